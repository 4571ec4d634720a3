"""Helpers that several test files share, or that a test's processes import.

Federations and projects
    toy                 A federation whose every sample is known; most tests train it.
    views               The toy data with two views that differ.
    small_objectives    Small self-supervised objectives and views.
    project             A Lightning project, written as if this package did not exist.
    counting            A module that logs what it counts in evaluations.
    curriculum          A Dataset that the project changes while it trains.
    foreign             Projects of packages that pip installs, by kind.
    configs             A config of ``pfl fit`` on the digits.
    stl10_archive       An archive in the format of STL-10.
    methods             The methods that tests of every method run by default, and with ``-m slow``.

References in plain torch, to which the package is held
    plain               Federated learning: clients, averages, rounds.
    plain_calibre       Calibre and pFL-SSL.
    plain_partner       Two networks on the same batches.
    plain_objectives    The self-supervised objectives.
    plain_report        The report of a study, a line for each row.
    kmeans_references   K-means as loops.

Engines and devices
    engines             VectorizedEngine beside SequentialEngine.
    process_helpers     Worker processes that are forks of the test's own.
    ray_helpers         Engines that misbehave in a worker, and a Ray within the test's process.
    fake_cluster        RayEngine without Ray's processes.
    emulated_graph      A CUDA graph without CUDA.
    other_device        A device that is not the CPU.
    other_device_cases  What runs on it, as a program.

Runs, studies and their files
    resume              A run that another one can resume from.
    kill                A callback that kills its process in a round.
    kill_at             Runs of the command line that are killed at a file operation.
    slurm               A job of SLURM as a process sees it.
    finished            Folders of finished runs, written by hand.
    results             Schemas of results, and the kept results of studies.
    events              TensorBoard's event files, read back.
    studies             Small studies, and their runs.
    pretended_study     ``pfl study`` whose runs only pretend.
    fuzz                Configs with one mistake each.
"""

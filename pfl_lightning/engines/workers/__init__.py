"""What engines with worker processes have in common, whoever starts the processes.

``engine`` cuts the tasks of a round into jobs. ``pool`` hands jobs to workers, replaces dead workers and returns
replies in order. ``payloads`` makes the messages to workers and sends common tensors once; ``packing`` turns objects
and tensors into bytes. ``worker`` runs in a worker process, around an ordinary engine. ``host`` says what the pool asks
of who starts the processes: Ray (:mod:`pfl_lightning.engines.ray`), or this machine
(:mod:`pfl_lightning.engines.processes`).
"""

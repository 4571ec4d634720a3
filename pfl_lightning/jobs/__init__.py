"""Commands of ``pfl`` in supervised processes, several at once: a study's runs, and a search's trials.

``supervision`` starts jobs, looks after them and ends them; ``local`` has processes on this machine, ``ray`` tasks
on a Ray cluster.
"""

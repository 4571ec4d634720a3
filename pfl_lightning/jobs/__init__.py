"""Commands of ``pfl`` in supervised processes, several at once: a study's runs, and a search's trials.

``supervision`` starts jobs, looks after them and ends them; ``processes`` has their processes, on this machine or on a
Ray cluster; ``warm`` starts those of this machine as copies of one that has imported everything.
"""

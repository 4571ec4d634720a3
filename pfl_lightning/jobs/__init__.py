"""Commands of ``pfl`` in supervised processes, several at once: a study's runs, and a search's trials.

``supervision`` starts jobs, looks after them and ends them; ``processes`` has their processes; ``warm`` starts these as
copies of one that has imported everything.
"""

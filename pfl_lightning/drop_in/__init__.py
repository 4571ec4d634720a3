"""Lightning projects as they are, made federations: :func:`pfl_lightning.federate` and ``FederatedLoop(method=...)``.

Where to look:

- ``federate``: the one call; ``predictions``: of each client's model; ``adapters``: export of clients' adapters.
- ``forms/``: what both forms need. ``callback_form`` is what ``FederatedLoop(method=...)`` does. Data and arguments:
  ``given_data``, ``checks``.
- ``outer/``: the federation, and what its Trainer has. ``federation``; ``user_hooks`` (setup, callbacks, checkpoints,
  predict); ``shown_model`` (the global model behind ``pl_module``); ``user_module_owner`` (the author's module: its
  setup, and what its author changes in it);
  ``logs_over_clients``; ``handed_in`` (which callbacks and options hold in local fits; what is refused stands in
  ``federation/outer_callbacks``); ``traveling`` (what is said of tensors that travel).
- ``client/``: the model of a client. ``user_module`` (what a client asks of it) and ``module_steps`` (its loss,
  optimizers and logs); ``parts`` (what a method needs of a module, and a client of it),
  ``plain_state``, ``roles`` (head, and what its user keeps or shares), ``tracing`` (which layer is the head),
  ``copies`` (also what is frozen), ``transient`` and ``remembered`` (attributes: put back, and kept for a client).
- ``features/``: models of methods on features. ``feature_module``; ``capture`` (features, classes and views of a
  batch); ``encoder`` (the module as far as its features, over all items); ``view_module`` (self-supervised methods).
- ``fits/``: ``local_fit`` and ``local_evaluation``; ``inner_trainer`` (as a module finds it) and ``loggers``;
  ``over_rounds`` (schedules, optimizers and counts from round to round), ``own_data`` (a client's items in the place of
  all), ``logs`` (what a module logs), ``module_calls`` (how a module is called).
"""

"""Lightning projects as they are, made federations: :func:`pfl_lightning.federate` and ``FederatedLoop(method=...)``.

Where to look:

- ``federate``: the one call; ``predictions``: of each client's model; ``adapters``: export of clients' adapters.
- ``forms/``: what both forms need. ``callback_form`` is what ``FederatedLoop(method=...)`` does, with
  ``trainer_data`` (internals of Lightning), ``loaded_module`` and ``cli_optimizers``. Data and
  arguments: ``given_data``, ``checks``.
- ``outer/``: the federation, and what its Trainer has. ``federation``; ``user_hooks`` (setup, callbacks, checkpoints,
  predict); ``shown_model`` (the global model behind ``pl_module``); ``user_module_owner`` (the author's module, its
  copies, and what hooks give them), ``fingerprint`` (how a module differs), ``set_up``; ``logs_over_clients``;
  ``handed_in`` (which callbacks and options hold in local fits; what is refused stands in
  ``federation/outer_callbacks``); ``traveling`` (what is said of tensors that travel).
- ``client/``: a client. ``module_client`` and ``module_steps``, with ``made_class`` (of a method) and
  ``module_options``, ``network_parts``, ``roles`` and ``head``, ``tracing`` (which layer is the head), ``parts`` (what
  a method needs of a module), ``chosen`` (what its user keeps or shares), ``copies``, ``transient``,
  ``remembered`` (attributes), ``frozen``.
- ``features/``: methods on features. ``feature_client`` with ``feature_parts``, ``feature_method``, ``passes``,
  ``capture``; ``view_client``, ``views`` and ``encoder`` (self-supervised methods).
- ``fits/``: ``local_fit`` and ``local_evaluation``; ``inner_trainer`` (as a module finds it) and ``loggers``;
  ``resume`` (what goes on from round to round), ``own_data`` (a client's items in the place of all),
  ``added_layers`` (of local callbacks), ``logs`` (what a module logs), ``module_calls`` (how a module is called).
"""

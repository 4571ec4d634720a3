"""Lightning projects as they are, made federations: :func:`pfl_lightning.federate` and ``FederatedLoop(method=...)``.

Where to look:

- ``federate``: the one call; ``predictions``: of each client's model; ``adapters``: export of clients' adapters.
- ``forms/``: what both forms need. ``callback_form`` is what ``FederatedLoop(method=...)`` does, with
  ``trainer_data`` (internals of Lightning), ``later_loaders``, ``loaded_module`` and ``cli_optimizers``. Data and
  arguments: ``given_data``, ``checks``.
- ``outer/``: the federation, and what its Trainer has. ``federation``, ``given_module``, ``logs_over_clients``;
  ``outer_hooks``, and ``handed_in`` (which of its callbacks and options hold in local fits; what is refused stands in
  ``federation/outer_callbacks``); ``user_stages`` (setup, checkpoints, predict), ``set_up``, ``shown_model`` (the
  global model behind ``pl_module``), ``traveling`` (what is said of tensors that travel).
- ``client/``: a client. ``module_client`` and ``module_steps``, with ``made_class`` (of a method) and
  ``module_options``, ``network_parts``, ``roles`` and ``head``, ``tracing`` (which layer is the head), ``parts`` (what
  a method needs of a module), ``chosen`` (what its user keeps or shares), ``copies``, ``transient``,
  ``remembered`` (attributes), ``frozen``.
- ``features/``: methods on features. ``feature_client`` with ``feature_parts``, ``feature_method``, ``passes``,
  ``capture``; ``view_client``, ``views`` and ``encoder`` (self-supervised methods).
- ``fits/``: a local fit and an evaluation. ``module_trainer``, ``module_evaluation``, ``inner_trainer`` (with its
  callbacks, as a module finds it) and ``loggers``, ``added_layers`` (of local callbacks), ``validation``,
  ``continuity`` and ``kept_modes`` (from round to round), ``module_calls``, ``logs``, ``counters``.
"""

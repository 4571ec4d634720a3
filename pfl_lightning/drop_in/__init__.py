"""Lightning projects as they are, made federations: :func:`pfl_lightning.federate` and ``FederatedLoop(method=...)``.

Where to look:

- The two forms: ``federate``; ``project_callback`` and ``callback_form``, with ``trainer_data`` (internals of
  Lightning), ``later_loaders``, ``prediction`` and ``cli_optimizers``. Data and arguments: ``given_data``, ``checks``.
- The federation, and what its Trainer has: ``federation``; ``trainer_checks`` and ``handed_options`` (its options),
  ``outer_hooks`` and ``local_callbacks`` (its callbacks), ``user_stages`` (setup, checkpoints, predict),
  ``shown_model`` (the global model behind ``pl_module``).
- A client: ``client``, with ``network_parts``, ``roles`` and ``head``, ``tracing`` (which layer is the head), ``parts``
  (what a method needs of a module), ``copies``, ``transient``, ``frozen``, ``adapters``.
- Methods on features: ``features``, ``features_pass``, ``capture``.
- A local fit and an evaluation: ``module_trainer``, ``module_evaluation``, ``local_hooks`` and ``local_loggers``,
  ``local_validation``, ``continuity`` (from round to round), ``optimizers``, ``logs``, ``counters``, ``patching``.
"""

"""Lightning projects as they are, made federations: :func:`pfl_lightning.federate`."""

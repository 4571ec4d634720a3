"""chemprop: message passing over molecules, with its own module, loader and warm-up."""

from __future__ import annotations

from _helpers.foreign.project import Made, Project

CHAINS = ["C" * length for length in range(1, 13)]
SMILES = [f"{chain}{end}" for chain in CHAINS for end in ("O", "N", "Cl")]


def mpnn() -> Made:
    import numpy as np
    from chemprop import data, models, nn

    points = [data.MoleculeDatapoint.from_smi(smiles, np.array([0.1 * len(smiles)])) for smiles in SMILES]
    train, validation = data.MoleculeDataset(points[:27]), data.MoleculeDataset(points[27:])
    scaler = train.normalize_targets()
    validation.normalize_targets(scaler)
    module = models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=2),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=8, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler)),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
    )
    return module, {
        "train_dataloaders": data.build_dataloader(train, batch_size=9, shuffle=False),
        "val_dataloaders": data.build_dataloader(validation, batch_size=9, shuffle=False),
    }


PROJECTS = [
    Project("chemistry", "chemprop", "MPNN", "SMILES", mpnn, ("chemprop",), head="predictor.ffn.1.2", slow=True)
]

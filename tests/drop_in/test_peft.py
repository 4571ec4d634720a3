"""Adapters of peft on models of transformers, with small random weights and without downloads.

The first test takes over 10 s where transformers is imported for the first time.
"""

from typing import Any

import lightning as L
import pytest
import torch
from _helpers.toy import assert_same, quiet_trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from pfl_lightning import FederatedLoop, SequentialEngine, export_adapters, federate
from pfl_lightning.errors import ConfigurationError, FederationError
from pfl_lightning.methods import FedAvg, FedSALoRA, FFALoRA

peft = pytest.importorskip("peft", reason="adapters need the extra peft")
transformers = pytest.importorskip("transformers", reason="the adapted models are of transformers")

CLASSES, RANK = 3, 2
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def text_model() -> Any:
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=12, num_labels=CLASSES, **SMALL)
    return transformers.BertForSequenceClassification(config)


def image_model() -> Any:
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES, **SMALL)
    return transformers.ViTForImageClassification(config)


def texts() -> Any:
    return torch.randint(1, 30, (24, 6), generator=torch.Generator().manual_seed(0))


def images() -> Any:
    return torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(0))


MODELS = {
    "bert": (text_model, texts, {"task_type": "SEQ_CLS"}),
    "vit": (image_model, images, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]}),
}
KINDS = pytest.mark.parametrize("kind", MODELS)


def base(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[kind][0]()


class Adapted(L.LightningModule):
    """A thin module around an adapted model."""

    def __init__(self, kind: str = "bert") -> None:
        super().__init__()
        model, targets = base(kind), dict(MODELS[kind][2])
        if kind == "vit":  # whose layers were called query and value before
            names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
            targets["target_modules"] = [name for name in ("q_proj", "v_proj", "query", "value") if name in names]
        self.model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_dropout=0.1, **targets))

    def forward(self, inputs: Any) -> Any:
        return self.model(inputs).logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fitted(method: Any, kind: str = "bert", rounds: int = 1, **options: Any) -> Any:
    module = options.pop("module", None) or Adapted(kind)
    data = TensorDataset(MODELS[kind][1](), torch.arange(24) % CLASSES)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    federation, data = federate(
        module, loader, method, num_clients=2, head=(), seed=1, engine=options.pop("engine", None)
    )
    loop, ckpt_path = FederatedLoop(), options.pop("ckpt_path", None)
    trainer = quiet_trainer(rounds, loop, *options.pop("callbacks", ()), **options)
    trainer.fit(federation, datamodule=data, ckpt_path=ckpt_path)
    return federation, module, loop


def adapters(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


@KINDS
def test_adapters_are_averaged_and_their_base_stays(kind):
    federation, module, loop = fitted(FedAvg, kind)
    before = base(kind).state_dict()
    kept = {n.replace(".base_layer", ""): t for n, t in module.model.get_base_model().state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in before.items() if name in kept)
    size = sum(t.numel() * 4 for t in adapters(module).values())
    assert loop.traffic.up == loop.traffic.down == {"weights": 2 * size}
    assert federation.personal.num_bytes == 0
    changed = [n for n, t in adapters(Adapted(kind)).items() if not torch.equal(t, adapters(module)[n])]
    assert len(changed) == len(adapters(module))
    weights = [p.data_ptr() for p in module.parameters() if not p.requires_grad]
    for copy in (federation.models[0].module, federation.global_model(), federation.client_model(1)):
        assert [p.data_ptr() for p in copy.parameters() if not p.requires_grad] == weights


@pytest.mark.parametrize("method", [FedSALoRA, FFALoRA])
def test_methods_for_adapters(method):
    federation, _, loop = fitted(method)
    first = adapters(Adapted())
    one, two = (dict(federation.client_model(k).named_parameters()) for k in (0, 1))
    same = {name for name in first if torch.equal(one[name], two[name])}
    if method is FedSALoRA:
        assert same == {name for name in first if "lora_A" in name}
    else:
        assert same == set(first)
        assert {n for n in first if torch.equal(one[n], first[n])} == {n for n in first if "lora_A" in n}
    sent = sum(4 * t.numel() for n, t in first.items() if ("lora_A" in n) is (method is FedSALoRA))
    assert loop.traffic.up == {"weights": 2 * sent}


@KINDS
@pytest.mark.parametrize("method", [FedAvg, FedSALoRA])
def test_exported_adapters_are_loaded_by_peft(kind, method, tmp_path):
    federation, _, _ = fitted(method, kind, engine=SequentialEngine())
    folders = export_adapters(federation, tmp_path)
    assert [folder.name for folder in folders] == ["client_0", "client_1"]
    inputs = MODELS[kind][1]()
    for client, folder in enumerate(folders):
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
        loaded = peft.PeftModel.from_pretrained(base(kind), folder).eval()
        with torch.no_grad():
            assert torch.equal(loaded(inputs).logits, federation.client_model(client).eval()(inputs))


def tensor_bytes(value):
    """Bytes of all tensors in a checkpoint, each memory counted once."""
    sizes, waiting = {}, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.Tensor):
            sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return sum(sizes.values())


def test_resume_is_exact(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    options = {"engine": SequentialEngine(), "enable_checkpointing": True}
    whole, module, _ = fitted(FedSALoRA, rounds=2, callbacks=[saver], **options)
    path = tmp_path / "epoch=0.ckpt"
    frozen, trained = (sum(4 * p.numel() for p in module.parameters() if p.requires_grad is on) for on in (False, True))
    schedules = 3 * 2048  # where those of the clients stand
    assert tensor_bytes(torch.load(path, weights_only=False)) < frozen + 8 * trained + schedules
    again, _, _ = fitted(FedSALoRA, rounds=2, ckpt_path=path, engine=SequentialEngine())
    for client in (0, 1):
        assert_same(again.client_model(client).state_dict(), whole.client_model(client).state_dict())


def test_without_an_adapter_there_is_none_to_export(tmp_path):
    class Bare(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.model = base("bert")

    federation, _, _ = fitted(FedAvg, module=Bare(), engine=SequentialEngine())
    with pytest.raises(ConfigurationError, match="Bare has no network of peft"):
        export_adapters(federation, tmp_path)
    unfitted, _ = federate(Adapted(), DataLoader(TensorDataset(texts())), FedAvg, num_clients=2, head=())
    with pytest.raises(FederationError, match="there are no clients before"):
        export_adapters(unfitted, tmp_path)

"""Tutorial: clients adapt a large model, and send adapters alone."""

# %% Imports
from pathlib import Path

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from pfl_lightning import FederatedLoop, export_adapters, federate
from pfl_lightning.datamodules import DirichletOverClients
from pfl_lightning.methods import FedSALoRA

Batch = tuple[Tensor, Tensor]


# %% A classifier of Hugging Face, which would be a pretrained one
def make_classifier() -> BertForSequenceClassification:
    """A small BERT with random weights: nothing is downloaded."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=16, num_labels=3, **size))


# %% Sentences of three topics, each with words of its own
def make_sentences() -> TensorDataset:
    """Sentences of eight words, (600, 8), of which three are of the topic."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.arange(600) % 3
    words = torch.randint(1, 70, (600, 8), generator=generator)
    words[:, 2:5] = 70 + 10 * topics[:, None] + torch.randint(0, 10, (600, 3), generator=generator)
    return TensorDataset(words, topics)


# %% A thin LightningModule around the adapted model
class Topics(L.LightningModule):
    """Low-rank adapters (LoRA) of rank 4 at the attention, and the classifier, train; everything else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(make_classifier(), LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8))

    def forward(self, words: Tensor) -> Tensor:
        """Class scores, (N, 3)."""
        return self.model(words).logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Cross entropy."""
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


# %% A federation: matrices A are averaged, matrices B and the classifier are each client's own
L.seed_everything(0)
module = Topics()
loader = DataLoader(make_sentences(), batch_size=16, shuffle=True)
rule = DirichletOverClients(num_clients=4, alpha=0.5, samples_per_client=100)
federation, data = federate(module, loader, FedSALoRA, rule, head="*.classifier", epochs=1)
loop = FederatedLoop()
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}
trainer = L.Trainer(max_epochs=3, callbacks=[loop], enable_checkpointing=False, **quiet)
trainer.fit(federation, datamodule=data)
print(f"val_accuracy/mean: {float(trainer.callback_metrics['val_accuracy/mean']):.3f}")

# %% What was sent, and what is stored
whole = sum(4 * p.numel() for p in module.parameters())
print(f"the model: {whole / 1e3:.0f} kB")
print(f"sent by a client in a round: {sum(loop.traffic.up.values()) / (3 * 4 * 1e3):.1f} kB")
print(f"stored for a client: {federation.personal.num_bytes / 4e3:.1f} kB")
base = module.model.get_base_model().bert.pooler.dense.weight
same = federation.client_model(3).model.get_base_model().bert.pooler.dense.weight
print("one copy of what is frozen:", base.data_ptr() == same.data_ptr())

# %% An adapter for every client, which peft loads without this package
folders = export_adapters(federation, "adapters")
print([folder.name for folder in folders], sorted(path.name for path in Path("adapters/client_3").glob("adapter_*")))
loaded = PeftModel.from_pretrained(make_classifier(), "adapters/client_3").eval()
words = make_sentences().tensors[0][:5]
with torch.no_grad():
    print("equal scores:", torch.equal(loaded(words).logits, federation.client_model(3).eval()(words)))

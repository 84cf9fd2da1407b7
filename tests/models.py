"""Small models with random weights, forward and loss: one factory a model.

Each returns a module and its keyword arguments. Dropout is off where it is a setting, so that two
runs agree; the module returns a tensor, a tuple or a dict of tensors, a loss among them.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Program = tuple[nn.Module, dict[str, Tensor]]
VOCABULARY = 50


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape)


def gpt2() -> Program:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    ids = tokens(2, 8)
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama() -> Program:
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
        attn_implementation="eager",
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    ids = tokens(2, 8)
    return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def bert() -> Program:
    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    labels = torch.tensor([0, 2])
    model = hf.BertForSequenceClassification(config)
    return model, {"input_ids": tokens(2, 8), "attention_mask": mask, "labels": labels}


def t5() -> Program:
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    ids = tokens(2, 8)
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": tokens(2, 6)}


def vit() -> Program:
    config = hf.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images = torch.randn(2, 3, 16, 16)
    return hf.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 2]),
    }


def whisper() -> Program:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=64,
        decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10, max_target_positions=16,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(2, 8, 20)
    return hf.WhisperForConditionalGeneration(config), {
        "input_features": sound,
        "labels": tokens(2, 6),
    }


def mamba() -> Program:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2,
        time_step_rank=4, use_cache=False, use_associative_scan=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    ids = tokens(2, 6)
    return hf.MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.blocks = nn.Sequential(Residual(8), nn.MaxPool2d(2), Residual(8))
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.blocks(self.stem(images))
        logits = self.head(F.adaptive_avg_pool2d(h, 1).flatten(1))
        return F.cross_entropy(logits, labels), logits


def resnet() -> Program:
    return ResNet(), {"images": torch.randn(4, 3, 8, 8), "labels": torch.tensor([0, 1, 2, 3])}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        h, last = self.rnn(self.embed(ids))
        logits = self.head(h)
        return F.cross_entropy(logits.transpose(1, 2), ids), last


def gru() -> Program:
    return Recurrent(), {"ids": tokens(2, 6)}


class UNet(nn.Module):
    """Two scales, each block checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.down = self.block(3, 8)
        self.middle = self.block(8, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = self.block(16, 3)

    @staticmethod
    def block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(1, outside), nn.SiLU()
        )

    def forward(self, noisy: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        skip: Tensor = checkpoint(self.down, noisy, use_reentrant=False)
        h: Tensor = checkpoint(self.middle, F.avg_pool2d(skip, 2), use_reentrant=False)
        h = torch.cat([skip, self.up(h)], dim=1)
        out: Tensor = checkpoint(self.out, h, use_reentrant=False)
        return F.mse_loss(out, noise), out


def unet() -> Program:
    return UNet(), {"noisy": torch.randn(2, 3, 8, 8), "noise": torch.randn(2, 3, 8, 8)}


class Experts(nn.Module):
    """Each token goes to the expert its router likes best; how many go where depends on data.

    A break in a loop makes Dynamo skip `forward`; what it calls is compiled, in two parts each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(16, 3), nn.LayerNorm(16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, chosen = self.router(self.norm(x)).softmax(-1).max(-1)
        return weight, chosen

    def send(self, x: Tensor, weight: Tensor, mine: Tensor, expert: nn.Module) -> Tensor:
        rows = mine.nonzero().flatten()
        if rows.numel() == 0:
            return torch.zeros_like(x)
        got = expert(x[rows]) * weight[rows, None]
        return torch.zeros_like(x).index_add(0, rows, got.to(x.dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight, chosen = self.route(x)
        for i, expert in enumerate(self.experts):
            x = x + self.send(x, weight, chosen == i, expert)
        return F.mse_loss(x, torch.ones_like(x)), x


def moe() -> Program:
    return Experts(), {"x": torch.randn(12, 16)}


MODELS: tuple[Callable[[], Program], ...] = (
    gpt2, llama, bert, t5, vit, whisper, mamba, resnet, gru, unet, moe,
)  # fmt: skip


def tensors_of(out: Any) -> list[Tensor]:
    """The floating tensors of a model's output, in order."""
    values = out.to_tuple() if hasattr(out, "to_tuple") else out
    found: list[Tensor] = []
    for value in values if isinstance(values, (tuple, list)) else (values,):
        found += [value] if isinstance(value, Tensor) else tensors_of(value) if value else []
    return found

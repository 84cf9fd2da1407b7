"""What is measured: six models, each with a task for training and one for inference.

Every case builds a module that returns one tensor, the loss where targets are given and the logits
otherwise, and its keyword arguments. `full` is the published size, for a GPU; `small` has the same
structure at a size at which a CPU without bfloat16 units takes milliseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

Task = Literal["train", "infer"]
Size = Literal["small", "full"]
Program = tuple[nn.Module, dict[str, Tensor]]

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


class Answer(nn.Module):
    """A transformers model that returns its loss, or its logits where no labels are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        out = self.model(**inputs)
        answer: Tensor = out.loss if "labels" in inputs else out.logits
        return answer


class Double(nn.Sequential):
    """Two convolutions, each normalized: one scale of a U-Net."""

    def __init__(self, inside: int, outside: int) -> None:
        layers: list[nn.Module] = []
        for width in (inside, outside):
            layers += [nn.Conv2d(width, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """A denoiser with skips between scales (Ronneberger et al., arXiv 1505.04597)."""

    def __init__(self, width: int, scales: int) -> None:
        super().__init__()
        widths = [width << i for i in range(scales)]
        self.down = nn.ModuleList(Double(*p) for p in zip([3, *widths], widths, strict=False))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.up = nn.ModuleList(Double(2 * w, w) for w in widths[:-1])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: Tensor, noise: Tensor | None = None) -> Tensor:
        skips: list[Tensor] = []
        h = noisy
        for block in self.down:
            h = block(F.max_pool2d(h, 2) if skips else h)
            skips.append(h)
        for i in reversed(range(len(self.up))):
            h = self.up[i](torch.cat([skips[i], self.grow[i](h)], dim=1))
        out: Tensor = self.out(h)
        return out if noise is None else F.mse_loss(out, noise)


class Perceptron(nn.Module):
    """Wide layers with nothing between them to fuse: batch 1 reads weights and does little else."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x if target is None else F.mse_loss(x, target)


def in_dtype(program: Program, dtype: torch.dtype) -> Program:
    """The module, changed in place, and its floating inputs in another dtype."""
    model, inputs = program
    return model.to(dtype), {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in inputs.items()
    }


@dataclass(frozen=True)
class Case:
    """A model, and how many sequences, images or rows it takes at a time.

    Args:
        build: makes the module of a size.
        inputs: makes the arguments for `(size, batch, length)`; with targets for training.
        shapes: `(batch, length)` for each size and task; the length is tokens, or pixels a side.
    """

    name: str
    build: Callable[[Size], nn.Module]
    inputs: Callable[[Size, Task, int, int], dict[str, Tensor]]
    shapes: dict[tuple[Size, Task], tuple[int, int]]

    def program(self, size: Size, task: Task) -> Program:
        """The module, in eval mode for inference, and its arguments, on the CPU in float32."""
        model = self.build(size).train(task == "train")
        return model, self.inputs(size, task, *self.shapes[size, task])


def shapes(
    train: tuple[int, int], infer: tuple[int, int], small: tuple[int, int]
) -> dict[tuple[Size, Task], tuple[int, int]]:
    """The shapes of a case; a small inference takes one of what a small training takes."""
    return {
        ("full", "train"): train,
        ("full", "infer"): infer,
        ("small", "train"): small,
        ("small", "infer"): (1, small[1]),
    }


def configured(model: type, config: type, full: Any, small: Any) -> Callable[[Size], nn.Module]:
    """A transformers model with random weights from its configuration."""
    return lambda size: Answer(model(config(**(full if size == "full" else small))))


def token_ids(vocabulary: dict[Size, int]) -> Callable[[Size, Task, int, int], dict[str, Tensor]]:
    """Random tokens, which a language model also predicts in training."""

    def make(size: Size, task: Task, batch: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(3, vocabulary[size], (batch, length))
        return {"input_ids": ids, "labels": ids} if task == "train" else {"input_ids": ids}

    return make


def classified(tokens: int = 0) -> Callable[[Size, Task, int, int], dict[str, Tensor]]:
    """Random images, or random tokens where there is a vocabulary, in two classes."""

    def make(size: Size, task: Task, batch: int, length: int) -> dict[str, Tensor]:
        images = {"pixel_values": torch.randn(batch, 3, length, length)} if not tokens else {}
        ids = {"input_ids": torch.randint(3, tokens, (batch, length))} if tokens else {}
        labels = {"labels": torch.randint(0, 2, (batch,))} if task == "train" else {}
        return {**images, **ids, **labels}

    return make


def denoised(size: Size, task: Task, batch: int, length: int) -> dict[str, Tensor]:
    """Noisy images and, in training, the noise."""
    names = ("noisy", "noise") if task == "train" else ("noisy",)
    return {name: torch.randn(batch, 3, length, length) for name in names}


def rows(size: Size, task: Task, batch: int, length: int) -> dict[str, Tensor]:
    """Rows of `length` numbers."""
    names = ("x", "target") if task == "train" else ("x",)
    return {name: torch.randn(batch, length) for name in names}


GPT2 = {
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA_1B = {  # Llama 3.2 1B
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "use_cache": False, **TOKENS,
}  # fmt: skip
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TWO_LAYERS = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "gpt2",
            configured(
                hf.GPT2LMHeadModel, hf.GPT2Config, GPT2,
                {**GPT2, "vocab_size": 512, "n_embd": 128, "n_layer": 2, "n_head": 4},
            ),
            token_ids({"full": 50_257, "small": 512}),
            shapes(train=(8, 512), infer=(1, 1), small=(4, 32)),
        ),
        Case(
            "llama-1b",
            configured(
                hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA_1B,
                {**LLAMA_1B, **TWO_LAYERS, "vocab_size": 512, "num_key_value_heads": 2},
            ),
            token_ids({"full": 128_256, "small": 512}),
            shapes(train=(2, 512), infer=(1, 1), small=(4, 32)),
        ),
        Case(
            "bert",
            configured(
                hf.BertForSequenceClassification, hf.BertConfig, BERT,
                {**BERT, **TWO_LAYERS, "vocab_size": 512},
            ),
            classified(tokens=512),
            shapes(train=(32, 128), infer=(1, 128), small=(4, 32)),
        ),
        Case(
            "vit",
            configured(
                hf.ViTForImageClassification, hf.ViTConfig, BERT,
                {**BERT, **TWO_LAYERS, "image_size": 32, "patch_size": 8},
            ),
            classified(),
            shapes(train=(32, 224), infer=(1, 224), small=(4, 32)),
        ),
        Case(
            "resnet50",
            configured(
                hf.ResNetForImageClassification, hf.ResNetConfig, {},
                {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]},
            ),
            classified(),
            shapes(train=(64, 224), infer=(1, 224), small=(4, 32)),
        ),
        Case(
            "unet",
            lambda size: UNet(64, 4) if size == "full" else UNet(16, 2),
            denoised,
            shapes(train=(8, 128), infer=(1, 128), small=(2, 16)),
        ),
        Case(
            "mlp-50m",
            lambda _: Perceptron(4096, 3),  # small enough for any machine
            rows,
            shapes(train=(64, 4096), infer=(1, 4096), small=(4, 4096)),
        ),
    )
}  # fmt: skip

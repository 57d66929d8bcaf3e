"""What the modules that fuse a family's blocks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

from spotlight_kernels.feed_forward import through
from spotlight_kernels.lora import Again, project
from spotlight_kernels.operators import (
    HeadStream,
    Modulation,
    add_norm,
    add_norm_again,
    gated_add,
    join_heads,
)

Angles = tuple[Tensor, Tensor] | None
New = Callable[..., Tensor]
Inputs = tuple[Again | None, Again | None]
"""How the inputs of image and text are computed once more; None: they are kept."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a class of blocks is fused.

    Attributes:
        forward: takes the place of the block's own.
        trouble: why a block cannot be fused; None if it can.
        example: arguments of a forward of two pictures of so many tokens and texts of so many;
            ``new(*shape)`` draws a tensor of the block's type.
        processors: diffusers' classes of attention processors, and those that take their place.
    """

    forward: Callable[..., Any]
    trouble: Callable[[Any], str | None]
    example: Callable[[Any, New, int, int], dict[str, Any]]
    processors: Mapping[type, type]


def heads(size: int, *parts: tuple[Tensor, Any, Angles]) -> Tensor:
    """Queries, keys or values of one sequence, [batch, tokens, heads, size].

    Args:
        parts: of each stream in order: [batch, tokens, heads * size], the norm or None, angles.
    """
    norms = [norm for _, norm, _ in parts if norm is not None]
    if len(parts) == 1 and not norms and parts[0][2] is None:
        return parts[0][0].view(*parts[0][0].shape[:2], -1, size)
    streams = [HeadStream(x, None if norm is None else norm.weight, angles) for x, norm, angles in parts]
    eps = norms[0].eps if norms else 0.0
    return join_heads(streams, size, eps, rounded=not (norms and isinstance(norms[0], nn.RMSNorm)))


def joint(
    attn: Any,
    size: int,
    text: tuple[Tensor, Angles] | None,
    image: tuple[Tensor, Angles],
    again: Inputs,
    *,
    text_first: bool,
) -> list[Tensor]:
    """Queries, keys and values of image and text, one sequence.

    Args:
        text, image: [batch, tokens, width] before the projections, and angles.
    """
    x, angles = image
    parts = [(project(x, (attn.to_q, attn.to_k, attn.to_v), again[0]), (attn.norm_q, attn.norm_k), angles)]
    if text is not None:
        x, angles = text
        made = project(x, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), again[1])
        parts.insert(0 if text_first else 1, (made, (attn.norm_added_q, attn.norm_added_k), angles))
    turned = [heads(size, *((made[i], norms[i], angles) for made, norms, angles in parts)) for i in range(2)]
    return [*turned, heads(size, *((made[2], None, None) for made, _, _ in parts))]


def joint_attention(
    processor: Any,
    attn: Any,
    size: int,
    text: tuple[Tensor, Angles] | None,
    image: tuple[Tensor, Angles],
    again: Inputs,
    mask: Tensor | None,
    *,
    text_first: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Outputs of the image, and of the text where that is a stream, as :func:`joint` takes them; without one,
    before the layer ``to_out``. ``processor`` says how they are computed.
    """
    attended = dispatch_attention_fn(
        *joint(attn, size, text, image, again, text_first=text_first),
        attn_mask=mask,
        backend=processor._attention_backend,
        parallel_config=processor._parallel_config,
    )
    x, _ = image
    if text is None:
        joined: Tensor = attended.flatten(2, 3).to(x.dtype)
        return joined
    streams = [(x.shape[1], attn.to_out[0]), (text[0].shape[1], attn.to_add_out)]
    order = slice(None, None, -1 if text_first else 1)
    of_image, of_text = outputs(attended, x, *streams[order])[order]
    return attn.to_out[1](of_image), of_text


class Turned:
    """An attention layer of one stream as a processor of diffusers' sees it: norms of queries and keys
    rotate, too, in one operator, so that the processor gets no angles; and projections are made at once.
    """

    def __init__(self, attn: Any, size: int, angles: Angles, made: Sequence[Tensor] = ()) -> None:
        """Of queries, keys and values, if the layer has projections of their own."""
        self._attn, self._size, self._angles = attn, size, angles
        if made:
            self.to_q, self.to_k, self.to_v = (lambda _, each=each: each for each in made)

    @classmethod
    def of(cls, attn: Any, size: int, angles: Angles, x: Tensor, again: Again | None) -> Turned:
        """With all projections of ``x`` [batch, tokens, width]."""
        return cls(attn, size, angles, project(x, (attn.to_q, attn.to_k, attn.to_v), again))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attn, name)

    def norm_q(self, x: Tensor) -> Tensor:
        """Of [batch, tokens, heads, size], or with the last two joined."""
        return heads(self._size, (x.flatten(2), self._attn.norm_q, self._angles)).view(x.shape)

    def norm_k(self, x: Tensor) -> Tensor:
        """As :meth:`norm_q`."""
        return heads(self._size, (x.flatten(2), self._attn.norm_k, self._angles)).view(x.shape)


def norm_trouble(attn: Any, *, added: bool = False, optional: bool = False) -> str | None:
    """Why heads or norms of queries and keys are none that :func:`heads` computes.

    Args:
        added: text has norms of its own.
    """
    names = ("norm_q", "norm_k", *(("norm_added_q", "norm_added_k") if added else ()))
    if odd := odd_heads(attn.inner_dim // attn.heads):
        return odd
    norms: list[Any] = [getattr(attn, name, None) for name in names]
    if optional and not any(norms):
        return None
    if any(
        getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is not None for norm in norms
    ):
        return "its queries and keys have no RMSNorm with weights alone"
    if len({(type(norm), norm.eps) for norm in norms}) > 1:
        return "its queries and keys have norms of several kinds"
    return None


def odd_heads(size: int) -> str | None:
    """Why heads are none that :func:`heads` computes."""
    return f"its heads are {size} wide, no power of two" if size & (size - 1) else None


def fused_projections(attn: Any) -> str | None:
    """Why: diffusers' ``fuse_qkv_projections`` was called."""
    return "its projections are joined" if getattr(attn, "fused_projections", False) else None


def pairs(angles: Angles, start: int = 0, stop: int | None = None) -> Angles:
    """Of tokens ``start`` to ``stop``, of cosines and sines [tokens, size] that repeat for both of a pair."""
    return None if angles is None else (angles[0][start:stop, ::2], angles[1][start:stop, ::2])


def repeated_angles(new: New, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """An example of what :func:`pairs` takes."""
    turn = new(tokens, size // 2).float().repeat_interleave(2, -1)
    return turn.cos(), turn.sin()


def unit_angles(new: New, *shape: int) -> Tensor:
    """An example of what :func:`complex_angles` takes."""
    turn = new(*shape).float()
    return torch.polar(torch.ones_like(turn), turn)


def padded(sequence: Tensor, token: int) -> Tensor:
    """An example of a mask, [2, tokens]: the second sequence has padding at ``token``."""
    mask = torch.ones(sequence.shape[:2], dtype=torch.bool, device=sequence.device)
    mask[1, token] = False
    return mask


def outputs(attended: Tensor, like: Tensor, *streams: tuple[int, Any]) -> list[Tensor]:
    """Attention's [batch, tokens, heads, size] by stream, heads joined, typed as ``like``.

    Args:
        streams: tokens, and the layer that they pass, if any.
    """
    parts = split(attended.flatten(2, 3).to(like.dtype), *(tokens for tokens, _ in streams))
    return [
        part if layer is None else project(part, [layer])[0]
        for part, (_, layer) in zip(parts, streams, strict=True)
    ]


def split(x: Tensor, *tokens: int) -> tuple[Tensor, ...]:
    """Streams of so many tokens; their gradients are joined at once."""
    parts: tuple[Tensor, ...] = x.split(tokens, 1)  # type: ignore[no-untyped-call]
    return parts


def normed(
    x: Tensor, branch: Tensor | None, by: Modulation, eps: float, *, rounded: bool = True, offset: float = 0.0
) -> tuple[Tensor, Tensor, Again]:
    """:func:`add_norm`, and how the norm is computed once more."""
    x, out = add_norm(x, branch, by, eps, rounded=rounded, offset=offset)
    return x, out, Again(add_norm_again, (x, by.scale, by.shift, by.weight, by.chosen, eps, offset, rounded))


@dataclass(frozen=True, slots=True)
class Normed:
    """A stream after its first norm.

    Attributes:
        x: [batch, tokens, width], to go on with.
        out: its modulated norm, and ``again`` how that is computed.
        rest: other parts of the modulation, each [batch, width].
    """

    x: Tensor
    out: Tensor
    again: Again
    rest: Sequence[Tensor]

    @classmethod
    def of(cls, x: Tensor, parts: Sequence[Tensor], eps: float) -> Normed:
        """Of a LayerNorm, with shift, scale and others."""
        shift, scale, *rest = parts
        return cls(*normed(x, None, Modulation(scale=scale, shift=shift), eps), rest)

    @classmethod
    def adaptive(cls, x: Tensor, norm: Any, temb: Tensor, count: int) -> Normed:
        """By diffusers' AdaLayerNormZero, whose layer makes so many parts."""
        return cls.of(x, norm.linear(norm.silu(temb)).chunk(count, dim=1), norm.norm.eps)

    def finished(self, branch: Tensor, eps: float, mlp: nn.Module) -> Tensor:
        """The block's output: attention's ``branch`` and then the MLP, both gated, are added.

        ``rest`` is attention's gate, then shift, scale and gate of the MLP.
        """
        gate, shift, scale, gate_mlp = self.rest
        x, out, again = normed(self.x, branch, Modulation(gate, scale, shift), eps)
        return gated_add(x, through(mlp, out, again), gate_mlp, rounded=True)


def two_streams(block: Any, image: Normed, text: Normed, **given: Any) -> tuple[Tensor, Tensor]:
    """What a block makes of an image and its text, which attend to each other: text, image.

    Args:
        given: to the attention.
    """
    branches = block.attn(
        hidden_states=image.out,
        encoder_hidden_states=text.out,
        again=(image.again, text.again),
        **given,
    )
    finished = image.finished(branches[0], block.norm2.eps, block.ff)
    return text.finished(branches[1], block.norm2_context.eps, block.ff_context), finished


def two_streams_example(block: Any, new: New, image: int, text: int) -> dict[str, Any]:
    """Two streams, and what modulates them."""
    width = block.attn.query_dim
    return {
        "hidden_states": new(2, image, width),
        "encoder_hidden_states": new(2, text, width),
        "temb": new(2, width),
    }


def single_stream(block: Any, x: Tensor, temb: Tensor, **given: Any) -> Tensor:
    """What a block makes of image and text in one sequence, attention and MLP side by side.

    Args:
        given: to the attention.
    """
    stream = Normed.adaptive(x, block.norm, temb, 3)
    inner = block.act_mlp(project(stream.out, [block.proj_mlp], stream.again)[0])
    attended = block.attn(hidden_states=stream.out, again=(stream.again, None), **given)
    branch = block.proj_out(torch.cat([attended, inner], dim=2))
    return gated_add(stream.x, branch, stream.rest[0], rounded=True)


def two_streams_trouble(block: Any, *norms: Any) -> str | None:
    """Why :func:`two_streams` cannot compute a block; ``norms``: its first ones."""
    return first(
        layer_norm_trouble(*norms, block.norm2, block.norm2_context),
        norm_trouble(block.attn, added=True),
    )


def layer_norm_trouble(*norms: Any) -> str | None:
    """Why a LayerNorm is none that the operators compute."""
    if any(type(norm) is not nn.LayerNorm or norm.weight is not None for norm in norms):
        return "its streams have no LayerNorm without weights"
    return None


def first(*reasons: str | None) -> str | None:
    """The first that is one."""
    return next((reason for reason in reasons if reason is not None), None)


def complex_angles(angles: Tensor | None) -> Angles:
    """Of unit complex numbers [..., tokens, size / 2]."""
    if angles is None:
        return None
    cos, sin = torch.view_as_real(angles).unbind(-1)
    return cos, sin

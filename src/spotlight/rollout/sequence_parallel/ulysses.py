"""Ulysses sequence parallelism in a diffusers transformer; with ``plans.py`` the only file that uses its
private interface.

Every rank holds all weights and gets the same inputs. Between the transformer's split and gather points a
rank holds a share of the image and text tokens; inside attention it holds all tokens of a share of the heads.
Entering and leaving moves no weights.

diffusers (0.42; pyproject.toml pins >=0.42,<0.43) provides the split points (the model's ``_cp_plan``; where
it has none, ours of ``plans.py``) and the attention (via ``_parallel_config`` on processors). The split and
gather hooks are ours: diffusers' own need divisible lengths, and its mode for others masks the wrong tokens
from degree 3 on and does not run over gloo (shown in tests/invariant/test_groups.py).

Invariants:
- Any number of text tokens works, and any number of image tokens from the degree on. All ranks attend with
  equally many tokens: text is padded and masked by less than two tokens per rank, and a rank with one image
  token less has one text token more.
- The output is complete and identical on all ranks, and equals the unsplit output up to rounding.
- Outside ``enter`` .. ``leave`` the modules are unmodified. A refused ``enter`` changes nothing.
- Forward only: a forward with gradients is refused, since the gather has no backward.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, TypeGuard

import torch

# Before any collective: functional collectives import it on first use, while other ranks wait.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import __version__ as diffusers_version
from diffusers.models._modeling_parallel import (
    ContextParallelConfig,
    ContextParallelInput,
    ContextParallelOutput,
    ParallelConfig,
)
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spotlight.models.condition import Pass, Passes, in_turn
from spotlight.models.experts import denoisers
from spotlight.rollout.sequence_parallel.plans import PLANS

_TEXT = "encoder_hidden_states"
_TEXT_MASKS = ("encoder_hidden_states_mask", "encoder_attention_mask")
Arguments = tuple[tuple[object, ...], dict[str, object]]

_SET_ON_CONFIG = ("_rank", "_world_size", "_ulysses_mesh", "_flattened_mesh", "_ulysses_local_rank")
"""Fields that diffusers' set-up fills from a device mesh; ours has one dimension and one group."""


class SequenceParallelError(ValueError):
    """The transformer cannot be split, or diffusers' interface changed."""


class Processor(Protocol):
    """The part of a diffusers attention processor that is used."""

    _parallel_config: ParallelConfig | None


@dataclass(frozen=True, slots=True)
class Attention:
    """The part of a diffusers attention module that is used."""

    heads: int
    processor: Processor


@dataclass(frozen=True, slots=True)
class TokenShares:
    """Tokens per rank, padding included; image plus text is the same on every rank."""

    image: tuple[int, ...]
    text: tuple[int, ...]

    def joint(self, tokens: int) -> bool:
        """Whether a tensor has the image's tokens followed by the padded text's, e.g. a mask for both."""
        return bool(self.text) and tokens == sum(self.image) + sum(self.text)

    def of_length(self, tokens: int) -> tuple[int, ...]:
        """The shares of a tensor with that many tokens.

        Raises:
            SequenceParallelError: neither the image nor the padded text has that length.
        """
        for shares in (self.image, self.text):
            if sum(shares) == tokens:
                return shares
        raise SequenceParallelError(
            f"a tensor to be split has {tokens} tokens; expected the image's {sum(self.image)} or the padded "
            f"text's {sum(self.text)}: the model's _cp_plan splits something else"
        )


def share_out(degree: int, image_tokens: int, text_tokens: int) -> TokenShares:
    """Shares for any lengths: image tokens as even as possible, padded text to level the sums.

    Text is padded to ``sum(shares.text)``, by less than ``2 * degree`` tokens.

    Raises:
        SequenceParallelError: fewer image tokens than ranks.
    """
    if image_tokens < degree:
        raise SequenceParallelError(
            f"an image of {image_tokens} tokens at sequence-parallel degree {degree}: expected at least one "
            "a rank; use a smaller degree for so small an image"
        )
    least, longer = divmod(image_tokens, degree)
    image = tuple(least + (rank < longer) for rank in range(degree))
    # At least one text token each: kernels need not handle empty tensors.
    each = max(-(-(image_tokens + text_tokens) // degree), image[0] + 1)
    if longer and degree * each == 2 * image_tokens:
        each += 1  # of_length could not distinguish equal lengths with unequal shares
    return TokenShares(image, tuple(each - tokens for tokens in image))


def divide(degree: int, tokens: int) -> TokenShares:
    """Equal shares, where no text is attended to together with the image and could level uneven ones.

    Raises:
        SequenceParallelError: the degree does not divide the tokens.
    """
    if tokens % degree:
        raise SequenceParallelError(
            f"{tokens} latent tokens at sequence-parallel degree {degree}: this transformer needs a degree "
            "that divides them; change the degree, the size or the number of frames"
        )
    return TokenShares((tokens // degree,) * degree, ())


class SequenceParallel:
    """Splits a worker's transformers over its group, and restores them.

    Args:
        modules: every module that rollouts may run, e.g. ``slots.modules().values()``.
        guidance: the halves of a group make one of guidance's two passes each, split over the half.

    Attributes:
        passes: how the two forwards of guidance are to be made now.

    Raises:
        SequenceParallelError: a module cannot be split, or diffusers' interface changed.
    """

    def __init__(self, modules: Iterable[nn.Module], *, guidance: bool = False) -> None:
        require_interface()
        self._modules = tuple(part for module in modules for part in denoisers(module).values())
        self._attentions = [_attentions(module) for module in self._modules]
        self._split: list[_Split] = []
        self._guidance = guidance
        self.passes: Passes = in_turn

    @property
    def active(self) -> bool:
        """Whether forwards, or the passes of guidance, are currently split."""
        return bool(self._split) or self.passes is not in_turn

    @property
    def ranks_per_forward(self) -> int:
        """How many ranks currently make each forward together."""
        return self._split[0].degree if self._split else 1

    def check(self, degree: int) -> None:
        """Raise SequenceParallelError unless forwards can be split over ``degree`` ranks.

        The degree, of a half where these make one pass each, must divide the attention heads of every module.
        """
        if self._guidance and degree > 1:
            if degree % 2:
                raise SequenceParallelError(
                    f"a group of {degree} with guidance in parallel: expected an even number, half for each "
                    "pass"
                )
            degree //= 2
        for heads in sorted({attention.heads for found in self._attentions for attention in found}):
            if degree < 1 or heads % degree:
                fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
                raise SequenceParallelError(
                    f"sequence-parallel degree {degree} does not divide the transformer's {heads} attention "
                    f"heads; use one of {fitting}"
                )

    def enter(
        self, group: dist.ProcessGroup, half: Callable[[dist.ProcessGroup], dist.ProcessGroup] | None = None
    ) -> None:
        """Split forwards over ``group``, replacing any earlier split; a group of one is not split.

        Args:
            half: makes a group of this rank's half of one; needed for four ranks with guidance in parallel.

        Raises:
            SequenceParallelError: the group's size does not divide the heads; nothing has changed.
        """
        self.check(group.size())
        self.leave()
        if group.size() == 1:
            return
        if self._guidance:
            whole = group
            if whole.size() > 2:
                assert half is not None, "the halves of a group need groups of their own"
                group = half(whole)
            self.passes = ParallelPasses(whole)
            if whole.size() == 2:
                return
        config = _config(group)
        for module, attentions in zip(self._modules, self._attentions, strict=True):
            self._split.append(_Split(module, group))
            _set_config(attentions, config)

    def leave(self) -> None:
        """Restore unsplit forwards; no effect if they are."""
        self.passes = in_turn
        for split in self._split:
            split.remove()
        self._split.clear()
        for attentions in self._attentions:
            _set_config(attentions, None)


class _Split:
    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self.degree = group.rank(), group.size()
        self._shares = TokenShares((), ())
        # Text that is attended to together with the image is split too.
        self._with_text = any(isinstance(plan, Mapping) and _TEXT in plan for plan in _plan(module).values())
        self._takes = inspect.signature(module.forward).parameters
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        ]
        for name, plan in _plan(module).items():
            for part in _parts(module, name):
                self._hook(part, plan)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, part: nn.Module, plan: object) -> None:
        if isinstance(plan, ContextParallelOutput):
            self._handles.append(part.register_forward_hook(self._gathering(plan.gather_dim)))
            return
        if not isinstance(plan, Mapping) or not all(
            isinstance(p, ContextParallelInput) for p in plan.values()
        ):
            raise SequenceParallelError(
                f"the _cp_plan of {type(part).__name__} holds {plan!r}; expected inputs by name or "
                f"index, or one output (diffusers {diffusers_version})"
            )
        outputs = {at: p for at, p in plan.items() if p.split_output}
        inputs = {at: p for at, p in plan.items() if not p.split_output}
        if inputs:
            handle = part.register_forward_pre_hook(self._splitting(part, inputs), with_kwargs=True)
            self._handles.append(handle)
        if outputs:
            self._handles.append(part.register_forward_hook(self._splitting_outputs(outputs)))

    def _begin(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
        if torch.is_grad_enabled():
            raise SequenceParallelError(
                "a forward with gradients inside a sequence-parallel group: only rollouts are split; run it "
                "under torch.no_grad, or dissolve the group first"
            )
        if not self._with_text:
            self._shares = TokenShares((), ())  # the first tensor to be split shows how many there are
            return args, kwargs
        image, text = (_tensor(kwargs, name) for name in ("hidden_states", _TEXT))
        tokens, image_tokens = text.shape[1], _image_tokens(module, image)
        self._shares = share_out(self.degree, image_tokens, tokens)
        missing = sum(self._shares.text) - tokens
        if missing == 0:
            return args, kwargs
        named = [name for name in _TEXT_MASKS if name in self._takes]
        if not named:
            raise SequenceParallelError(
                f"{tokens} text and {image_tokens} image tokens at degree {self.degree} need {missing} "
                f"tokens of padding, but {type(module).__name__} takes no text mask: use a degree that "
                "divides both"
            )
        mask = kwargs.get(named[0])
        if not isinstance(mask, Tensor):
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        padded = {
            _TEXT: F.pad(text, (0, 0, 0, missing)),
            named[0]: F.pad(mask, (0, missing)),
        }
        return args, kwargs | padded

    def _own(self, value: object, plan: ContextParallelInput) -> object:
        """This rank's share of a tensor; None and tensors of other ranks than planned for pass through."""
        if not isinstance(value, Tensor) or plan.expected_dims not in (None, value.ndim):
            return value
        dim = plan.split_dim
        if not self._shares.image:
            self._shares = divide(self.degree, value.shape[dim])
        if self._shares.joint(value.shape[dim]):
            text = value.narrow(dim, sum(self._shares.image), sum(self._shares.text))
            parts = (self._narrow(value, dim, self._shares.image), self._narrow(text, dim, self._shares.text))
            return torch.cat(parts, dim)
        return self._narrow(value, dim, self._shares.of_length(value.shape[dim]))

    def _narrow(self, value: Tensor, dim: int, shares: Sequence[int]) -> Tensor:
        return value.narrow(dim, sum(shares[: self._rank]), shares[self._rank])

    def _splitting(
        self, part: nn.Module, plans: Mapping[str, ContextParallelInput]
    ) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], Arguments]:
        signature = inspect.signature(part.forward)
        unknown = [name for name in plans if name not in signature.parameters]
        if unknown:
            raise SequenceParallelError(
                f"the _cp_plan splits input {unknown[0]!r} of {type(part).__name__}, which takes "
                f"{', '.join(signature.parameters)} (diffusers {diffusers_version})"
            )

        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
            bound = signature.bind(*args, **kwargs)
            for name, plan in plans.items():
                if name in bound.arguments:
                    bound.arguments[name] = self._own(bound.arguments[name], plan)
            return bound.args, bound.kwargs

        return hook

    def _splitting_outputs(
        self, plans: Mapping[int, ContextParallelInput]
    ) -> Callable[[nn.Module, object, object], object]:
        def hook(module: nn.Module, args: object, output: object) -> object:
            if isinstance(output, Tensor):
                return self._own(output, plans[0])
            if not isinstance(output, Sequence):
                raise SequenceParallelError(
                    f"{type(module).__name__} gives {type(output).__name__}, not tensors"
                )
            return tuple(self._own(x, plans[i]) if i in plans else x for i, x in enumerate(output))

        return hook

    def _gathering(self, dim: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
        def hook(module: nn.Module, args: object, output: Tensor) -> Tensor:
            shares = self._shares.image
            if output.shape[dim] != shares[self._rank]:
                raise SequenceParallelError(
                    f"{type(module).__name__} gives {output.shape[dim]} tokens; expected this rank's "
                    f"{shares[self._rank]} image tokens: only those are gathered"
                )
            lacking = max(shares) - shares[self._rank]
            if lacking:
                fill = output.new_zeros(*output.shape[:dim], lacking, *output.shape[dim + 1 :])
                output = torch.cat([output, fill], dim)
            output = output.contiguous()
            whole = [torch.empty_like(output) for _ in shares]
            dist.all_gather(whole, output, group=self._group)
            return torch.cat([x.narrow(dim, 0, n) for x, n in zip(whole, shares, strict=True)], dim)

        return hook


def require_interface() -> None:
    """Raise SequenceParallelError, naming what is missing, unless diffusers' interface is as expected."""
    gone: list[str] = []
    for kind, names in (
        (ContextParallelConfig, ("ulysses_degree", *_SET_ON_CONFIG)),
        (ParallelConfig, ("context_parallel_config",)),
        (ContextParallelInput, ("split_dim", "split_output", "expected_dims")),
        (ContextParallelOutput, ("gather_dim",)),
    ):
        present = {field.name for field in dataclasses.fields(kind)}
        gone += [f"{kind.__name__}.{name}" for name in names if name not in present]
    if gone:
        raise SequenceParallelError(
            f"diffusers {diffusers_version} lacks {', '.join(gone)}; expected the interface of 0.42: install "
            "diffusers>=0.42,<0.43, or adapt spotlight/rollout/sequence_parallel/ulysses.py"
        )


def _config(group: dist.ProcessGroup) -> ParallelConfig:
    config = ContextParallelConfig(ulysses_degree=group.size())
    config._rank = config._ulysses_local_rank = group.rank()
    config._world_size = group.size()
    # One communicator instead of diffusers' four, since each must be recreated at every regroup.
    # It stands in for a one-dimensional device mesh, which attention only asks for its group.
    config._ulysses_mesh = config._flattened_mesh = SimpleNamespace(get_group=lambda: group)
    return ParallelConfig(context_parallel_config=config)


def _plan(module: nn.Module) -> Mapping[str, object]:
    plan = getattr(module, "_cp_plan", None) or PLANS.get(type(module).__name__)
    if not isinstance(plan, Mapping) or not plan:
        raise SequenceParallelError(
            f"{type(module).__name__} has no _cp_plan in diffusers {diffusers_version}, nor one of ours: it "
            "cannot be split over several GPUs; use degree 1"
        )
    return plan


def _splits(processor: object) -> TypeGuard[Processor]:
    return hasattr(processor, "_parallel_config")


def _attentions(module: nn.Module) -> list[Attention]:
    _plan(module)
    found: list[Attention] = []
    for part in module.modules():
        processor, heads = getattr(part, "processor", None), getattr(part, "heads", None)
        if _splits(processor) and isinstance(heads, int):
            found.append(Attention(heads, processor))
    if not found:
        raise SequenceParallelError(
            f"{type(module).__name__} has no attention module with heads and a processor that knows "
            f"_parallel_config (diffusers {diffusers_version}): it cannot be split; use degree 1"
        )
    return found


def _set_config(attentions: Sequence[Attention], config: ParallelConfig | None) -> None:
    for attention in attentions:
        attention.processor._parallel_config = config


def _parts(module: nn.Module, name: str) -> list[nn.Module]:
    """Modules matching a plan's name, where ``*`` stands for one component."""
    pattern = re.compile(r"[^.]+".join(re.escape(part) for part in name.split("*")))
    parts = [part for path, part in module.named_modules() if pattern.fullmatch(path)]
    if not parts:
        raise SequenceParallelError(
            f"the _cp_plan names {name!r}, which {type(module).__name__} does not have"
        )
    return parts


def _image_tokens(module: nn.Module, latents: Tensor) -> int:
    """Of latents [batch, tokens, width], or [batch, channels, frames, height, width]."""
    if latents.ndim == 3:
        return latents.shape[1]
    config: Any = module.config
    frames, height, width = latents.shape[2:]
    side = config.patch_size
    return int(frames // config.patch_size_t * (height // side) * (width // side))


def _tensor(kwargs: Mapping[str, object], name: str) -> Tensor:
    value = kwargs.get(name)
    if not isinstance(value, Tensor):
        raise SequenceParallelError(
            f"{name} is {type(value).__name__}; a forward that is split takes a tensor by that name"
        )
    return value


# -- the two passes of classifier-free guidance, made by the halves of a group at the same time ------------


class ParallelPasses:
    """The lower half of the ranks makes the conditional pass, the upper half the negative one.

    All ranks then exchange velocities and get equal bits of both. Each half may split its pass by Ulysses.

    Args:
        group: of an even number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._half = group, group.size() // 2

    def __call__(self, conditional: Pass, negative: Pass) -> tuple[Tensor, Tensor]:
        """Both velocities, of which this rank computes one."""
        own = (conditional if self._group.rank() < self._half else negative)().contiguous()
        made = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(made, own, group=self._group)
        return made[0], made[self._half]

"""What can be extended, by name: add one by a line here or by an entry point of the registry's group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotlight_rewards.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typer import Typer

    from spotlight.config.schema import RunConfig
    from spotlight.config.sections.algorithm import AlgorithmSection
    from spotlight.dry_run.fitting import Fitting
    from spotlight.models.family import ModelFamily
    from spotlight.scheduler.fleet.fleet_machine import FleetPolicy
    from spotlight.scheduler.rollouts import PolicyKind
    from spotlight.store.metrics import SinkFactory
    from spotlight.store.run_estimate import RunPace
    from spotlight.store.run_store import RunStore
    from spotlight_fleet.providers.node_provider import NodeProviderKind


class _Algorithms(Registry["type[AlgorithmSection]"]):
    def _trouble(self, name: str, found: Any) -> str | None:
        if (trouble := super()._trouble(name, found)) is not None:
            return trouble
        field = found.model_fields.get("name")
        if field is None or field.default != name:
            own = "none" if field is None else repr(field.default)
            return f"the default of that section's `name` is {own}; expected {name!r}, as the entry point's"
        if not isinstance(getattr(found, "implementation", None), str):
            return "that section has no `implementation`; expected the 'module:attribute' of its Algorithm"
        return None


FAMILIES: Registry[type[ModelFamily]] = Registry(
    "model.family",
    "spotlight.families",
    {
        "qwen-image": "spotlight.models.families.qwen_image:QwenImage",
        "qwen-image-edit": "spotlight.models.families.qwen_image_edit:QwenImageEdit",
        "qwen-image-2.1": "spotlight.models.families.qwen_image_21:QwenImage21",
        "z-image": "spotlight.models.families.z_image:ZImage",
        "flux2-klein": "spotlight.models.families.flux2_klein:Flux2Klein",
        "flux2-dev": "spotlight.models.families.flux2_dev:Flux2Dev",
        "flux": "spotlight.models.families.flux:Flux",
        "flux-kontext": "spotlight.models.families.flux_kontext:FluxKontext",
        "krea-2": "spotlight.models.families.krea2:Krea2",
        "sd3": "spotlight.models.families.sd3:StableDiffusion3",
        "wan": "spotlight.models.families.wan:Wan",
        "wan-i2v": "spotlight.models.families.wan_i2v:WanI2V",
        "hunyuan-video": "spotlight.models.families.hunyuan_video:HunyuanVideo",
        "hunyuan-video-1.5": "spotlight.models.families.hunyuan_video_15:HunyuanVideo15",
    },
    base="spotlight.models.family:ModelFamily",
)
"""Model families: a subclass of :class:`~spotlight.models.family.ModelFamily`."""

ALGORITHMS: Registry[type[AlgorithmSection]] = _Algorithms(
    "algorithm.name",
    "spotlight.algorithms",
    {
        "flow-grpo": "spotlight.config.sections.algorithm:FlowGRPOConfig",
        "flow-grpo-fast": "spotlight.config.sections.algorithm:FlowGRPOFastConfig",
        "grpo-guard": "spotlight.config.sections.algorithm:GRPOGuardConfig",
        "diffusion-nft": "spotlight.config.sections.algorithm:DiffusionNFTConfig",
        "awm": "spotlight.config.sections.algorithm:AWMConfig",
        "flow-dppo": "spotlight.config.sections.newer_algorithms:FlowDPPOConfig",
        "v-grpo": "spotlight.config.sections.newer_algorithms:VGRPOConfig",
        "dgpo": "spotlight.config.sections.newer_algorithms:DGPOConfig",
        "diffusion-dpo": "spotlight.config.sections.newer_algorithms:DiffusionDPOConfig",
        "rvm": "spotlight.config.sections.newer_algorithms:RVMConfig",
        "ram": "spotlight.config.sections.newer_algorithms:RAMConfig",
        "opsd": "spotlight.config.sections.gradient_algorithms:OPSDConfig",
        "refl": "spotlight.config.sections.gradient_algorithms:ReFLConfig",
        "sft": "spotlight.config.sections.newer_algorithms:SFTConfig",
    },
    base="spotlight.config.sections.algorithm:AlgorithmSection",
)
"""Algorithms: the configuration section, which names the class that computes the loss."""

NODE_PROVIDERS: Registry[NodeProviderKind] = Registry(
    "fleet.target.provider",
    "spotlight.node_providers",
    {
        "emulated": "spotlight_fleet.providers.emulated_provider:EMULATED",
        "kubernetes": "spotlight_fleet.providers.kubernetes_provider:KUBERNETES",
        "skypilot": "spotlight_fleet.providers.skypilot_provider:SKYPILOT",
        "commands": "spotlight_fleet.providers.command_provider:COMMANDS",
    },
)
"""Who adds and drops spot nodes: a :class:`~spotlight_fleet.providers.node_provider.NodeProviderKind`."""

SINKS: Registry[SinkFactory] = Registry(
    "metrics.sinks",
    "spotlight.sinks",
    {"tensorboard": "spotlight.store.sinks:TensorBoard"},
    extras={"wandb": "wandb", "trackio": "trackio"},
)
"""Experiment trackers: a :class:`~spotlight.store.metrics.SinkFactory`."""

RUN_STORES: Registry[RunStore] = Registry("runs_dir", "spotlight.run_stores", {})
"""What keeps runs at addresses, by scheme (``s3``): a :class:`~spotlight.store.run_store.RunStore`."""

COMMANDS: Registry[Callable[[Typer], None]] = Registry("the commands' entry point", "spotlight.commands", {})
"""Commands of other packages: a function that adds them to the command line."""

CHECKS: Registry[Callable[[str, int | None, Path | None], None]] = Registry(
    "the option of `spotlight doctor`", "spotlight.checks", {}
)
"""Longer checks of other packages, by the option of ``spotlight doctor`` that asks for one: a function of the
model asked about, its side in pixels (None: the model's own), and where a report goes (None: nowhere).
"""

FITTINGS: Registry[Fitting] = Registry("what --fit fits", "spotlight.fittings", {})
"""What makes a run fit, by what it fits (``gpu``): a :class:`~spotlight.dry_run.fitting.Fitting`."""

PACES: Registry[Callable[[RunConfig, int], RunPace | str]] = Registry("an estimate", "spotlight.paces", {})
"""How fast a run will be before it has begun, by its configuration and ranks; a string: what that would need.
One entry, ``plan``.
"""

FLEET_POLICIES: Registry[type[FleetPolicy]] = Registry(
    "policies",
    "spotlight.fleet_policies",
    {
        "spot-learner": "spotlight.scheduler.policies.spot_learner.spot_learner:SpotLearner",
        "target": "spotlight.scheduler.policies.target.hold_target:HoldTarget",
    },
    base="spotlight.scheduler.fleet.fleet_machine:FleetPolicy",
)
"""What machines do, and how many are wanted, beside the default:
:class:`~spotlight.scheduler.fleet.fleet_machine.FleetPolicy`.
"""

POLICIES: Registry[PolicyKind] = Registry(
    "policies",
    "spotlight.policies",
    {
        "next-iteration": "spotlight.scheduler.policies.next_iteration.next_iteration:NextIteration",
        "exploration": "spotlight.scheduler.policies.exploration.exploring:Exploration",
        "subset": "spotlight.scheduler.policies.subset.subset:Subset",
        "overlap": "spotlight.scheduler.policies.overlap.overlap:Overlap",
        "trainers": "spotlight.scheduler.policies.trainers.trainers:Trainers",
        "whole-groups": "spotlight.scheduler.policies.whole_groups.whole_groups:WholeGroups",
    },
    base="spotlight.scheduler.policy:Policy",
)
"""What a run may do beside the default, in the order asked: a
:class:`~spotlight.scheduler.policy.Policy`, made from all rollouts of the run and its settings.
"""

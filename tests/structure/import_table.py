"""Who may import whom, which the checks in ``test_imports.py`` hold the packages to."""

from __future__ import annotations

from pathlib import Path

import spotlight
import spotlight_bucket
import spotlight_dashboard
import spotlight_files
import spotlight_fleet
import spotlight_kernels
import spotlight_plan
import spotlight_rewards
import spotlight_weights

PACKAGES = (
    spotlight,
    spotlight_kernels,
    spotlight_rewards,
    spotlight_files,
    spotlight_weights,
    spotlight_fleet,
    spotlight_plan,
    spotlight_dashboard,
    spotlight_bucket,
)
SOURCE = Path(spotlight.__file__).parent
SOURCES = {
    package.__name__: Path(package.__file__).parent for package in PACKAGES if package.__file__ is not None
}

PACKAGES_MAY_IMPORT: dict[str, set[str]] = {
    "spotlight_kernels": set(),
    "spotlight_rewards": set(),
    "spotlight_files": {"spotlight_rewards"},
    "spotlight_weights": {"spotlight_rewards"},
    "spotlight_fleet": {"spotlight_rewards"},
    "spotlight": {
        "spotlight_kernels",
        "spotlight_rewards",
        "spotlight_files",
        "spotlight_weights",
        "spotlight_fleet",
    },
    "spotlight_plan": {
        "spotlight",
        "spotlight_rewards",
        "spotlight_files",
        "spotlight_fleet",
        "spotlight_kernels",
    },
    "spotlight_dashboard": {"spotlight", "spotlight_rewards"},
    "spotlight_bucket": {"spotlight", "spotlight_rewards"},
}
"""Packages, each a distribution of its own; the leaf first."""

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "scheduler": {"config"},
    "diffusion": set(),
    "algorithms": {"config", "diffusion"},
    "models": {"diffusion"},
    "store": {"scheduler"},
    "testbed": set(),
    "data": {"config", "scheduler", "models", "testbed"},
    "rollout": {"models", "diffusion"},
    "worker": {"rollout", "models"},
    "training": {"config", "models", "algorithms", "diffusion", "rollout"},
    "dry_run": {"config", "data", "models", "rollout", "store", "testbed", "training"},
    "report": {"store", "config", "testbed"},
}
MAY_IMPORT["runtime"] = set(MAY_IMPORT) - {"report", "worker"}
MAY_IMPORT["cluster"] = MAY_IMPORT["runtime"] | {"runtime", "worker"}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["api"] = set(MAY_IMPORT)
MAY_IMPORT["testing"] = {"diffusion", "models", "rollout", "scheduler"}
"""Rooms of the trainer, and which others each may import. Nothing of the trainer imports its ``testing``."""

BASICS = ("spotlight_rewards.base.", "spotlight_rewards.registry", "spotlight_rewards.reward_config")
"""Of the leaf: what every room may import."""
USE_REWARDS = {"dry_run", "runtime", "cluster", "cli", "api"}
"""Rooms that may import all of the leaf."""
USE_FLEET = {"config", "cluster", "cli"}
"""Rooms that may import what is known of nodes."""
USE_FILES = {"models", "data", "training", "dry_run", "runtime", "cluster", "cli"}
"""Rooms that may import what is known of model files."""
USE_WEIGHTS = {"training", "cluster", "cli"}
"""Rooms that may import how weights travel."""
MEASURE = {"training", "rollout", "runtime", "cluster"}
"""Rooms that may import what measures steps."""
USE_KERNELS = {"models"}
"""Rooms that may import fused operators."""
FROM_TRAINER: dict[str, set[str]] = {
    "spotlight_plan": {"scheduler", "config", "store"},
    "spotlight_dashboard": {"store"},
    "spotlight_bucket": {"store"},
}
"""Rooms of the trainer that other packages may import; their commands may import all."""

INNER_ROOMS: dict[str, dict[str, set[str]]] = {
    "spotlight_fleet": {
        "gpus": set(),
        "notices": set(),
        "traces": set(),
        "ray_names": set(),
        "facts": set(),
        "connection": set(),
        "emulated": {"ray_names", "traces"},
        "providers": {"emulated", "ray_names"},
    },
    "spotlight_plan": {
        "traces": set(),
        "simulation": set(),
        "prices": set(),
        "scenarios": {
            "prices",
        },
        "learning_speed": {
            "scenarios",
        },
        "processes": set(),
        "compare": {
            "learning_speed",
            "processes",
            "scenarios",
        },
        "calibration": {
            "scenarios",
        },
        "strategy_runs": {
            "compare",
            "scenarios",
        },
        "candidates": {
            "prices",
            "scenarios",
        },
        "iteration_form": {
            "learning_speed",
            "scenarios",
        },
        "closed_form": {
            "compare",
            "iteration_form",
            "learning_speed",
            "scenarios",
        },
        "estimates": {
            "candidates",
            "closed_form",
            "compare",
            "prices",
            "scenarios",
            "strategy_runs",
        },
        "search": {
            "candidates",
            "closed_form",
            "compare",
            "estimates",
            "processes",
            "scenarios",
            "strategy_runs",
        },
        "sweep_file": set(),
        "launch_files": {
            "candidates",
            "scenarios",
        },
        "explanation": {
            "candidates",
            "closed_form",
            "estimates",
            "scenarios",
            "search",
            "strategy_runs",
        },
        "pages": {
            "candidates",
            "compare",
            "estimates",
            "explanation",
            "prices",
            "scenarios",
            "search",
            "strategy_runs",
        },
    },
}
"""Folders and modules within a room, and which of the others each may import."""

FOR_INNER_ROOMS = {"spotlight_plan": {"traces", "simulation"}}
"""Of a package or room: what all of its folders and modules may import."""

MESSAGES = {f"spotlight.scheduler.{module}" for module in ("types", "effects", "events", "records")}
"""Ids and sizes, and what controller, workers and learner say to each other."""
SPEAK_MESSAGES = {"rollout", "worker", "training", "report", "spotlight_dashboard"}
ALSO = {
    ("rollout", "spotlight.scheduler.seeds"),
    ("training", "spotlight.store.store_errors"),
}
"""Single modules allowed beside the table."""
FOR_ALL = {"registry", "garbage", "licences"}
"""Modules of no room, which every room may import."""

SCHEDULER_PARTS: dict[str, set[str]] = {
    "messages": set(),
    "cluster": {"messages"},
    "fleet": {"messages", "cluster"},
    "learner": {"messages", "cluster", "fleet"},
    "rollouts": {"messages", "cluster"},
    "training_tasks": {"messages", "rollouts"},
    "policies": {"messages", "cluster", "fleet", "rollouts"},
    "controller": {"messages", "cluster", "fleet", "learner", "rollouts", "training_tasks"},
}
"""Who may import whom inside the scheduler; ``messages`` is every module of its own level not named here."""
LIGHT = (
    *(f"spotlight.{room}" for room in ("config", "data", "scheduler", "store")),
    "spotlight_rewards",
    "spotlight_fleet",
    "spotlight_plan",
    "spotlight_dashboard",
    "spotlight_bucket",
)
"""Packages and rooms that start without torch, Ray and the model libraries."""
MODELS = ("diffusers", "transformers", "peft", "accelerate")
SHARDING = ("torch.distributed.fsdp", "torch.distributed.tensor")
HEAVY = ("torch", "ray", *SHARDING, *MODELS)
STARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "planning a run": (
        "from spotlight.config.load import load_config; "
        "from spotlight.dry_run.run_plan import make_plan; make_plan(load_config(None, []))",
        ("ray", *SHARDING, *MODELS),
    ),
    "naming a family": ("import spotlight.models.family, spotlight.models.slots", (*SHARDING, *MODELS)),
    "the head of a cluster": ("import spotlight.cluster.cluster_run", MODELS),
}
"""Statements that must not import some heavy packages: the rest takes only who needs it seconds."""
HOLD_MODELS = {
    f"spotlight_rewards.{module}"
    for module in (
        *(f"geneval.{each}" for each in ("mask2former", "object_colors", "openmmlab", "tiny_detector")),
        *(f"models.{each}" for each in ("pretrained_model", "tiny_vlm", "vision_language")),
        "reading.onnx_reader",
        "reading.pp_ocr",
        "reading.text_lines",
        "reading.tiny_pp_ocr",
        *(
            f"preference.{each}"
            for each in ("aesthetic_head", "clip_towers", "open_clip_weights", "tiny_clip")
        ),
    )
}
"""Modules of light rooms that hold a reward's models: only a function of that reward imports them."""
MEASURE_CARDS = "spotlight_plan.commands.gpu."
"""Modules that need torch to measure with: only their package's function imports them."""
NEED_RAY = {
    f"spotlight_fleet.{each}"
    for each in ("connection", "emulated.node_processes", "emulated.local_cluster", "emulated.market")
}

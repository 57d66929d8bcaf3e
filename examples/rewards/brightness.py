"""A custom reward: is each picture as bright as its prompt's metadata asks for?"""

from __future__ import annotations

from spotlight_rewards.reward import RewardInputError


def brightness(images, prompts, metadata, *, tolerance=0.5):
    """1 if a picture's mean brightness is as requested, 0 if it is ``tolerance`` or more away."""
    found = [float(image.mean()) / 255 for image in images]
    wanted = [line["brightness"] for line in metadata]
    scores = [max(0.0, 1 - abs(f - w) / tolerance) for f, w in zip(found, wanted, strict=True)]
    return {"score": scores, "mean": found}


def check(prompts, metadata):
    """Called once with all prompts, before any work."""
    for prompt, line in zip(prompts, metadata, strict=True):
        value = line.get("brightness")
        if not isinstance(value, float | int) or not 0 <= value <= 1:
            raise RewardInputError(
                f"brightness reward: 'brightness' of prompt {prompt!r} is {value!r}; "
                "expected a number in [0, 1] on its line of the prompts file"
            )

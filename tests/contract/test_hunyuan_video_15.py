"""What only HunyuanVideo 1.5 has: a guider, a component of the pipeline that may be switched off."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from diffusers import ClassifierFreeGuidance

from spotlight.models.families.hunyuan_video_15 import HunyuanVideo15


@pytest.mark.parametrize(("scale", "passes"), [(1.0, 1), (6.0, 2)])
def test_the_plain_pipeline_guides_as_we_do(scale: float, passes: int) -> None:
    pipe = SimpleNamespace(guider=ClassifierFreeGuidance(guidance_scale=1.0, enabled=False))
    exec("\n".join(HunyuanVideo15.loading_lines(scale, 512)), {"pipe": pipe})
    pipe.guider.set_state(step=0, num_inference_steps=4, timestep=None)
    assert pipe.tokenizer_max_length == 512  # its own is 1,000
    assert (pipe.guider.guidance_scale, pipe.guider.num_conditions) == (scale, passes)

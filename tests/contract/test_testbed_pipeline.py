"""The embedded pipeline is what everybody may assume: plain diffusers loads it, it is small, and it draws."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from tools.testbed import architecture
from tools.testbed.flow import (
    TEMPLATE_TOKENS,
    FlowRecipe,
    JointModel,
    make_data,
    pack_latents,
    train_flow,
)
from tools.testbed.make import Recipe, reconstruction_quality
from tools.testbed.making import recipe_hash
from tools.testbed.prompts import TAGS, split
from tools.testbed.scenes import render_all
from tools.testbed.scores import ScoreRecipe, generate

from spotlight.testbed import PIPELINE_DIR
from spotlight_rewards.shapes import shapes

TRAIN, TEST = split()


@pytest.fixture(scope="module")
def pipeline():
    return QwenImagePipeline.from_pretrained(PIPELINE_DIR)


@pytest.fixture(scope="module")
def parts(pipeline):
    return architecture.Parts(
        pipeline.tokenizer, pipeline.text_encoder, pipeline.vae, pipeline.transformer, pipeline.scheduler
    )


def weights(pipeline):
    for name in ("text_encoder", "vae", "transformer"):
        for key, value in getattr(pipeline, name).state_dict().items():
            yield f"{name}.{key}", value


def public(config):
    # Through JSON, as a saved configuration goes: tuples become lists.
    return json.loads(json.dumps({key: value for key, value in config.items() if not key.startswith("_")}))


def test_size_and_precision(pipeline):
    assert sum(path.stat().st_size for path in PIPELINE_DIR.rglob("*") if path.is_file()) <= 15e6
    for name, value in weights(pipeline):
        assert value.dtype == torch.float32, name
        assert not (value.view(torch.int32) & 0x1FFF).any(), f"{name} is not coarsened"


def test_coarsening_keeps_eleven_bits():
    layer = torch.nn.Linear(50, 50)
    before = layer.weight.detach().clone()
    architecture.coarsen(layer)
    assert ((layer.weight - before).abs() <= before.abs() * 2.0**-11).all()
    assert (layer.weight != before).any()


def test_the_untrained_pipeline_has_the_same_architecture(pipeline):
    fresh = architecture.assemble(architecture.build(seed=0))
    assert {k: v.shape for k, v in weights(fresh)} == {k: v.shape for k, v in weights(pipeline)}
    assert public(fresh.scheduler.config) == public(pipeline.scheduler.config)
    assert public(fresh.transformer.config) == public(pipeline.transformer.config)
    assert fresh.tokenizer.get_vocab() == pipeline.tokenizer.get_vocab()


def test_the_template_is_as_long_as_with_the_real_tokenizer(pipeline):
    assert pipeline.prompt_template_encode == architecture.PROMPT_TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == TEMPLATE_TOKENS == 34
    before, after = architecture.PROMPT_TEMPLATE.split("{}")
    assert len(pipeline.tokenizer(before).input_ids) == 34
    assert len(pipeline.tokenizer(after).input_ids) == 5


def test_a_prompt_of_n_words_gives_n_plus_5_embeddings(pipeline):
    for record in TRAIN + TEST:
        words = record["prompt"].split()
        tokens = pipeline.tokenizer(architecture.PROMPT_TEMPLATE.format(record["prompt"])).input_ids
        assert len(tokens) == 34 + len(words) + 5, record["prompt"]
        assert pipeline.tokenizer.decode(tokens[34:-5]) == record["prompt"]
    for text, count in ((TEST[0]["prompt"], len(TEST[0]["prompt"].split()) + 5), (" ", 6)):
        embeds, mask = pipeline.encode_prompt(text)
        assert embeds.shape == (1, count, architecture.TEXT_WIDTH)
        assert mask is None


def test_training_sees_the_embeddings_that_the_pipeline_makes(pipeline, parts):
    texts = [TEST[0]["prompt"], TEST[-1]["prompt"]]
    embeds, mask = pipeline.encode_prompt(texts)
    latents, t = torch.randn(2, 64, 48), torch.tensor([0.3, 0.9])
    tokens = parts.tokenizer(
        [architecture.PROMPT_TEMPLATE.format(text) for text in texts], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        ours = JointModel(parts, 8, 8)(latents, t, tokens.input_ids, tokens.attention_mask)
        theirs = pipeline.transformer(
            hidden_states=latents,
            timestep=t,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, 8, 8)]] * 2,
            return_dict=False,
        )[0]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_noise_schedule_is_qwen_images(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    pipeline("a circle", height=32, width=32, num_inference_steps=10, output_type="latent")
    sigmas = pipeline.scheduler.sigmas
    assert sigmas[0] == 1
    assert float(sigmas[-2]) == pytest.approx(0.02, abs=1e-6)
    assert sigmas[5] > 0.55  # shifted towards noise


def test_the_vae_is_near_lossless(parts):
    quality = reconstruction_quality(parts, TEST, seed=7)
    assert quality["psnr_db_mean"] > 38
    assert quality["strict"] >= 0.995
    assert quality["graded"] >= 0.995


def test_latents_keep_the_scale_of_pixels(parts):
    latents = pack_latents(parts.vae, render_all(TRAIN[:128], seed=8))
    assert latents.shape == (128, 64, 48)
    assert abs(float(latents.mean())) < 0.1
    channels = latents.unflatten(2, (12, 4)).movedim(2, 0).flatten(1)
    half_ranges = (channels.amax(1) - channels.amin(1)) / 2
    assert float(half_ranges.min()) > 0.8
    assert float(half_ranges.max()) < 1.5
    assert 0.2 < float(latents.std()) < 0.5  # pictures are mostly ground


@pytest.mark.slow  # of weights that do not change
def test_pictures_follow_their_prompts(pipeline):
    records = [record for record in TEST if record["tag"] in ("colors", "counting", "two_object")] * 4
    images = generate(pipeline, [record["prompt"] for record in records], ScoreRecipe(), seed=1)
    shuffled = [records[index] for index in np.random.default_rng(0).permutation(len(records))]
    own = shapes(list(images), [r["prompt"] for r in records], records)
    other = shapes(list(images), [r["prompt"] for r in shuffled], shuffled)
    assert np.mean(own["strict"]) > np.mean(other["strict"]) + 0.03
    assert np.mean(own["graded"]) > np.mean(other["graded"]) + 0.05


def test_the_record_is_of_these_weights_and_this_recipe():
    record = json.loads((PIPELINE_DIR / "TRAINING.json").read_text())
    assert record["recipe_sha256"] == recipe_hash(Recipe(seed=record["recipe"]["seed"]))
    scores = json.loads((PIPELINE_DIR / "scores.json").read_text())
    for setting in ("unguided", "guided"):
        assert set(scores[setting]["scores"]) == {*TAGS, "overall"}
    start = scores["unguided"]["scores"]
    assert 0.1 < start["overall"]["strict"] < 0.7, "reinforcement learning needs room to rise and a signal"


@pytest.mark.slow  # of the tool that made the weights
def test_training_is_deterministic_and_learns():
    recipe = FlowRecipe(pictures=32, steps=40, batch=4, learning_rate=3e-3, warmup_steps=4)

    def train(steps):
        parts = architecture.build(seed=0)
        data = make_data(parts, TRAIN, recipe, seed=1)
        losses = train_flow(parts, data, replace(recipe, steps=steps), seed=2, log=lambda line: None)
        return losses, parts.transformer.img_in.weight.detach()

    losses, first = train(40)
    again, second = train(40)
    assert losses == again
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    assert losses[-1] < losses[0]

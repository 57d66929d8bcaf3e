"""Contract tests for what other packages add, as Spotlight's own tests run them."""

from __future__ import annotations

from spotlight.testing.family_contract import FAMILY_CHECKS as FAMILY_CHECKS
from spotlight.testing.family_contract import PROMPTS as PROMPTS
from spotlight.testing.family_contract import FamilyCase as FamilyCase
from spotlight.testing.family_contract import LoadedFamily as LoadedFamily
from spotlight.testing.family_contract import Setting as Setting
from spotlight.testing.family_contract import call_pipeline as call_pipeline
from spotlight.testing.family_contract import call_video_pipeline as call_video_pipeline
from spotlight.testing.family_contract import load_family as load_family

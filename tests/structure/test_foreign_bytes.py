"""Where bytes become code, or a few of them memory without end, in all packages: each place is here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    # An index of torch's distributed checkpoint, by a list of the classes that it may name.
    ("training/sharded_files.py", "pickle._Unpickler"),
    # Between a process and the reward process that it started, over a socket pair without an address.
    ("pool/channel.py", "pickle.loads"),
    # A function of the user, between a script and the reward process that it starts: a file of mode 0600.
    ("api/pickled_reward.py", "pickle.loads"),
    # Lines of a family's own, in its tests.
    ("testing/family_contract.py", "exec"),
    # Commands of the configuration, which is code.
    ("providers/shell_command.py", "shell=True"),
    # A loader derived from yaml.SafeLoader, with bounds.
    ("base/yaml_tree.py", "yaml.load"),
    # With bounds of pixels; the others read sizes only, or have bounds of their own.
    ("base/media_files.py", "Image.open"),
    ("service/score_service.py", "PILImage.open"),
}
READERS = (
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "pickle._Unpickler",
    "marshal.loads",
    "dill.loads",
)
COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("recv_object_list", "send_object_list"),
}


def dangers(tree: ast.AST) -> Iterator[str]:
    """What a module may run code by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in READERS or name in ("Image.open", "PILImage.open"):
                yield name
            if name.startswith("yaml.") and node.attr.endswith("load"):
                yield name
        if not isinstance(node, ast.Call):
            continue
        keywords = {each.arg: each.value for each in node.keywords}
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in COLLECTIVES:
            yield called
        if isinstance(node.func, ast.Name) and called in ("eval", "exec"):
            yield called
        if (
            ast.unparse(node.func) == "torch.load"
            and ast.unparse(keywords.get("weights_only", node)) != "True"
        ):
            yield "torch.load"
        if ast.unparse(node.func) in ("np.load", "numpy.load") and "allow_pickle" in keywords:
            yield "np.load"
        if "shell" in keywords:
            yield f"shell={ast.unparse(keywords['shell'])}"


def test_bytes_become_code_nowhere_else() -> None:
    found = {
        ("/".join(path.parts[-2:]), danger)
        for package in (ROOT / "src", *(ROOT / "packages").glob("*/src"))
        for path in package.rglob("*.py")
        for danger in dangers(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "code",
    [
        "pickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "dist.broadcast_object_list(values)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "subprocess.run(command, shell=True)",
        "np.load(path, allow_pickle=True)",
        "yaml.safe_load(text)",
        "Image.open(path)",
    ],
)
def test_every_such_place_is_seen(code: str) -> None:
    assert list(dangers(ast.parse(code)))

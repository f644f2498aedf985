"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
README = (PROJECT / "README.md").read_text()


def test_the_library_example_prints_text(real_model: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    statements = [line for line in found[1].splitlines() if line and not line.startswith(" ")]
    assert len(statements) <= 10
    done = subprocess.run(
        [sys.executable, "-c", found[1]], capture_output=True, text=True, cwd=PROJECT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris.")


def test_every_command_shown_is_understood(tmp_path: Path) -> None:
    commands = re.findall(r"^(?:.*&& )?(python run\.py .*?)(?: +#.*)?$", README, re.MULTILINE)
    assert len(commands) >= 6
    for command in commands:
        words = command.split()[2:]
        flags = [word for word in words if word == "-m"]
        rest = [word for word in words if word != "-m"]
        if flags:
            rest = [re.sub(r",.*", "", word) for word in rest]
        done = subprocess.run(
            [sys.executable, str(PROJECT / "run.py"), "--cfg", "job", *rest],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)

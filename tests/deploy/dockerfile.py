"""Reads a Dockerfile into its instructions, so that tests can ask about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One instruction: its keyword in capitals, the rest of the line, and the stage it belongs to."""

    keyword: str
    value: str
    stage: int


def read_dockerfile(path: Path) -> list[Instruction]:
    """Join continued lines, leave comments out and number the stages from 0."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    instructions: list[Instruction] = []
    stage = -1
    for line in filter(None, (line.strip() for line in joined.splitlines())):
        keyword, _, value = line.partition(" ")
        stage += keyword.upper() == "FROM"
        instructions.append(Instruction(keyword.upper(), value.strip(), stage))
    return instructions


def environment(instructions: list[Instruction], stage: int) -> dict[str, str]:
    values = [each.value for each in instructions if each.keyword == "ENV" and each.stage == stage]
    return dict(pair.split("=", 1) for value in values for pair in value.split())

"""`rlflame export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlflame.cli.options import AllowModules, CheckpointFile, Debug, EnvFile, Json

if TYPE_CHECKING:
    from rlflame.storage.checkpoint import Checkpoint

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FILE", help="What to write. [default: ENV-ALGO.safetensors]"
    ),
]
Onnx = Annotated[
    bool, typer.Option("--onnx", help="An ONNX model, the normaliser and the bounds inside.")
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Compare the model with the policy on 1,000 observations; exit 1 above 1e-5.",
    ),
]


def export(
    file: CheckpointFile,
    out: Out = None,
    onnx: Onnx = False,
    check: Check = False,
    env_file: EnvFile = None,
    allow_modules: AllowModules = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the policy alone, without what only training needs."""
    from rlflame.config.flags import RuntimeFlags
    from rlflame.config.resolve import resolve_runtime
    from rlflame.rollout.blas import limit_threads

    resolve_runtime(RuntimeFlags(env_file=env_file, allow_modules=allow_modules))
    limit_threads(1)
    from rlflame.config import resolve
    from rlflame.console.output import print_note
    from rlflame.errors import ConfigError, RlflameError, format_command
    from rlflame.experiment import resume
    from rlflame.storage import export as files
    from rlflame.storage.run_folder import load_policy_file

    onnx = onnx or (out is not None and out.suffix.lower() == ".onnx")
    if check and not onnx:
        raise ConfigError("--check is for ONNX models.", "add --onnx")
    if onnx:
        files.check_onnx_available()
    source = load_policy_file(file)
    name = f"{resolve.make_short_name(source.env.id)}-{source.recipe.learning.algorithm}"
    out = out or Path(f"{name}{'.onnx' if onnx else '.safetensors'}")
    files.check_target(file, out, onnx)
    difference = None
    if onnx:
        data = files.write_onnx(source, out)
        if check:
            source = resume.check_environment(source)
            difference = files.measure_onnx_difference(source, data)
    else:
        files.write_policy(source, out)
        if source.evaluation is None:
            print_note(
                f"The policy has no recorded evaluation. {format_command('eval', out)} scores it."
            )
    passed = difference is None or difference <= files.TOLERANCE
    _print_file(source, out, difference, passed, as_json=as_json)
    if not passed:
        raise RlflameError(
            f"The model's actions differ from the policy's by {difference:.2g}, more than "
            f"{files.TOLERANCE:g}.",
            "this is a bug in rlflame, or in the onnxruntime that is installed",
        )


def _print_file(
    source: Checkpoint, out: Path, difference: float | None, passed: bool, *, as_json: bool
) -> None:
    from rlflame.console.output import as_json_text, format_pairs, print_result
    from rlflame.console.recipe_summary import format_evaluation
    from rlflame.storage.export import OBSERVATION_COUNT

    size = out.stat().st_size
    if as_json:
        fields = {"file": str(out), "bytes": size, "environment": source.env.id,
                  "difference": difference, "passed": passed}  # fmt: skip
        print_result(as_json_text(fields))
        return
    lines = [("file", f"{out}: {size / 1e3:,.1f} kB")]
    if source.evaluation is not None and out.suffix.lower() != ".onnx":
        lines.append(("recorded", format_evaluation(source.evaluation)))
    if difference is not None:
        text = f"the largest difference over {OBSERVATION_COUNT:,} observations is {difference:.2g}"
        lines.append(("check", text))
    for line in format_pairs(lines):
        print_result(line)

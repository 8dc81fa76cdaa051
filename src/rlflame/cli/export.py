"""The `rlflame export` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlflame.cli.options import CheckpointFile, Json, add_flag_options, load_source, print_pairs
from rlflame.config.flags import RuntimeFlags
from rlflame.console.output import as_json_text, print_result
from rlflame.errors import ConfigError, RlflameError

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="FILE", help="Output file. [default: ENV-ALGO.safetensors or .onnx]"
    ),
]
Onnx = Annotated[
    bool,
    typer.Option(
        "--onnx", help="Write an ONNX model with the observation normaliser and action bounds."
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Compare the ONNX model with the policy on 1,000 observations. Exit with code 1 if an "
        "action differs by more than 1e-5.",
    ),
]


@add_flag_options("env_file", "allow_modules", "debug")
def export(
    file: CheckpointFile,
    flags: RuntimeFlags,
    out: Out = None,
    onnx: Onnx = False,
    check: Check = False,
    as_json: Json = False,
) -> None:
    """Export a policy without its training state."""
    onnx = onnx or (out is not None and out.suffix.lower() == ".onnx")
    if check and not onnx:
        raise ConfigError("--check is for ONNX models.", "add --onnx")
    file, source, _ = load_source(file, flags)
    from rlflame.config.preset_catalog import make_short_name
    from rlflame.experiment import resume
    from rlflame.storage import export as files

    if onnx:
        files.check_onnx_available()
    name = f"{make_short_name(source.env.id)}-{source.recipe.learning.algorithm}"
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
    size, is_equal = out.stat().st_size, difference is None or difference <= files.TOLERANCE
    if as_json:
        fields = {"file": str(out), "bytes": size, "environment": source.env.id,
                  "difference": difference, "passed": is_equal}  # fmt: skip
        print_result(as_json_text(fields))
    else:
        lines = [("file", f"{out}: {size / 1e3:,.1f} kB")]
        if difference is not None:
            count = f"{files.OBSERVATION_COUNT:,} observations"
            lines.append(("check", f"the largest difference over {count} is {difference:.2g}"))
        print_pairs(lines)
    if not is_equal:
        raise RlflameError(
            f"The model's actions differ from the policy's by {difference:.2g}, more than "
            f"{files.TOLERANCE:g}.",
            "this is a bug in rlflame or in the installed onnxruntime",
        )

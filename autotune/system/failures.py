"""Any exception as an error that users can act on, and as a line of JSON that crosses to another
process."""

import json

from autotune.errors import AutotuneError, first_line
from autotune.system.resources import is_out_of_memory


def explain_error(error: Exception) -> AutotuneError:
    """The exception itself if autotune raised it on purpose, else one that says what it means and
    what to do.

    Example:
        >>> try:
        ...     autotune.plan("qwen-image", "photos")
        ... except Exception as error:
        ...     print(autotune.explain_error(error).hint)
    """
    if isinstance(error, AutotuneError):
        return error
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return AutotuneError(
            f"{where}{error.strerror}",
            hint="check the path, its permissions, and the free space on its disk",
        )
    if is_out_of_memory(error):
        hint = "close other programs that use memory, or raise the limit (ulimit -v, -d)"
        return AutotuneError(f"memory ran out: {error}", hint=hint)
    return AutotuneError(
        f"{type(error).__name__}: {first_line(error) or 'no message'}",
        hint="this is a bug in autotune; AUTOTUNE_TRACEBACK=1 shows where. Please report it",
    )


def error_line(error: AutotuneError) -> str:
    """The error as one line of JSON, without a line break."""
    return json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint})


def error_from(line: str) -> AutotuneError | None:
    """The error that `error_line` wrote, of its own class; None if the line holds none."""
    data = json.loads(line)
    if "error" not in data:
        return None
    kind = next(
        (kind for kind in _subclasses(AutotuneError) if kind.__name__ == data["error"]),
        AutotuneError,
    )
    return kind(data["message"], hint=data["hint"])


def _subclasses(kind: type[AutotuneError]) -> list[type[AutotuneError]]:
    return [kind, *(below for one in kind.__subclasses__() for below in _subclasses(one))]

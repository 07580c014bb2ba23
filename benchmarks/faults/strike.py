"""Does work that is struck by a fault end, run again, as work that was not? Counts, by a seed.

    nice .venv/bin/python -P -m benchmarks.faults.strike [FAULT...] [--work NAME...] [--number 20]

Faults are kill, full, readonly, quota, vanish, clock and stop; works are plan, cache, train, save,
report and push, on a small model and a simulated machine. Each is struck in a fork, at a moment
that is drawn: a third of the kills come inside a write and leave a part of the file. A full disk is
a tmpfs, one that turns read-only an ext4 on a loop device that meets an error, with files open and
its journal lost, so root is needed. A quota is an error of the opening alone: few kernels have them
on such disks. Writes one JSON line for each work and fault, with what differed.
"""

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

import psutil

FAULTS = ("kill", "full", "readonly", "quota", "vanish", "clock", "stop")
UNTYPED = 70  # the exit status of an error that is not one of autotune's
MARK = "AUTOTUNE_STRUCK"  # in the environment of all that a struck process starts
WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Work:
    """`run` does all in a folder, or goes on with what is there; `outcome` is what users rely on,
    the same bits however often it was struck."""

    run: Callable[[Path], object]
    outcome: Callable[[Path], object]
    begin: Callable[[Path], object] = lambda folder: None


def fork(run: Callable[[], object], log: Path, *, strike: Callable[[], None]) -> int:
    """Start it in a process of its own, which ends with the exit status of a command."""
    if child := os.fork():
        return child
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ[MARK] = str(os.getpid())
    from autotune.errors import explain_error

    status = UNTYPED
    try:
        strike()
        run()
        status = 0
    except Exception as error:
        told = explain_error(error)  # as the command line does
        print(f"{type(error).__name__}: {told.message} / {told.hint}")
        if "a bug in autotune" in told.hint:
            traceback.print_exc()
        else:
            status = told.exit_status
    finally:
        sys.stdout.flush()
        os._exit(status)


def at_write(
    number: int, folder: Path, act: Callable[[str], object], counter: Iterator[int] | None = None
) -> Callable[[], None]:
    """Have the process `act` before the write of that number: an opening, renaming or removal;
    again at the next if it returns True."""
    numbers, waits = counter or count(), [True]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        is_write = event == "open" and isinstance(given[2], int) and given[2] & WRITES
        if not (is_write or event in ("os.rename", "os.remove", "os.mkdir", "sqlite3.connect")):
            return
        if os.fsdecode(given[0] if isinstance(given[0], str | bytes) else "").find(str(folder)) < 0:
            return
        if next(numbers) >= number and waits[0]:
            waits[0] = act(os.fsdecode(given[0]) if event == "os.rename" else "") is True

    return lambda: sys.addaudithook(hook)


@dataclass(frozen=True)
class Target:
    """A work that was done unharmed once: its writes, its time, and its outcome."""

    work: Work
    num_writes: int
    seconds: float
    kib: int
    outcome: object
    ended: Counter[str] = field(default_factory=Counter)

    @classmethod
    def measure(cls, work: Work, folder: Path) -> Self:
        told, number = folder.with_suffix(".count"), count()

        def run() -> None:
            at_write(0, folder, lambda renamed: None, number)()
            began = time.monotonic()
            work.run(folder)
            told.write_text(f"{next(number)} {time.monotonic() - began}")

        folder.mkdir()
        work.begin(folder)
        log, before = folder.with_suffix(".log"), used_kib(folder)
        if os.waitpid(fork(run, log, strike=lambda: None), 0)[1]:
            sys.exit(log.read_text())
        writes, seconds = told.read_text().split()
        kib = used_kib(folder) - before
        return cls(work, int(writes), float(seconds), kib, work.outcome(folder))


def jump_clocks(chance: random.Random) -> None:
    """Let the time of day jump by days, back and forth, at a tenth of all looks."""
    real, shift = time.time, [0.0]

    def jumping() -> float:
        if chance.random() < 0.1:
            shift[0] = chance.choice((-1, 0, 1)) * chance.uniform(0, 3e6)
        return real() + shift[0]

    time.time = jumping


def call(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def make_disk(fault: str, folder: Path) -> None:
    """Mount a disk there that can be filled, or that can turn read-only while files are open."""
    image = folder.with_suffix(".img")
    if fault == "full":
        call("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder)
        return
    image.touch()
    os.truncate(image, 64 << 20)
    call("mkfs.ext4", "-q", image)
    call("mount", "-o", "loop,errors=remount-ro", image, folder)
    (folder / "lost+found").rmdir()


def mend_disk(fault: str, folder: Path) -> None:
    """Let a disk be written again; what its journal had not noted is lost, as after a power cut."""
    if fault == "full":
        call("mount", "-o", "remount,size=64m", folder)
        return
    image = folder.with_suffix(".img")
    unmount(folder)
    checked = subprocess.run(["e2fsck", "-fy", image], check=False, capture_output=True)
    assert checked.returncode < 4, "not mended"
    call("mount", "-o", "loop", image, folder)
    shutil.rmtree(folder / "lost+found", ignore_errors=True)


def unmount(folder: Path) -> None:
    """Wait for children that end with the struck process; they may still look at it."""
    for _ in range(60):
        if not subprocess.call(["umount", str(folder)], stderr=subprocess.DEVNULL):
            return
        time.sleep(0.5)
    sys.exit(f"something still uses {folder}")


def fail_disk(folder: Path) -> None:
    """Tell its driver of an error: it takes no more writes, to open files neither."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    device = next(Path(device).name for device, place, *_ in mounts if place == str(folder))
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")


def make_harm(fault: str, number: int, folder: Path, chance: random.Random) -> Callable[[], None]:
    """Return what a struck process does to itself first."""

    is_inside = fault == "kill inside a write"

    def kill(renamed: str) -> bool:
        if is_inside and not renamed:
            return True
        if is_inside:
            os.truncate(renamed, int(chance.random() * Path(renamed).stat().st_size))
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    def refuse(renamed: str) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    acts: dict[str, Callable[[str], object]] = {
        "kill": kill,
        "kill inside a write": kill,
        "readonly": lambda renamed: fail_disk(folder),
        "quota": refuse,
        "vanish": lambda renamed: shutil.rmtree(folder),
    }
    if fault == "clock":
        return lambda: jump_clocks(chance)
    return at_write(number, folder, acts[fault]) if fault in acts else lambda: None


def find_wrong(target: Target, folder: Path, child: int) -> Iterator[str]:
    """Do the work to its end; yield what is not as if nothing had happened."""
    log = folder.with_suffix(".log")
    if os.waitpid(fork(lambda: target.work.run(folder), log, strike=lambda: None), 0)[1]:
        yield f"run again: {log.read_text()[-1500:]}"
    elif (outcome := target.work.outcome(folder)) != target.outcome:
        yield f"another outcome: {str(outcome)[:300]}"
    if parts := [*folder.glob("run/**/*.part")]:
        yield f"left half-written: {parts}"
    ends = time.monotonic() + 15
    while any((each.info["environ"] or {}).get(MARK) == str(child)
              for each in psutil.process_iter(["environ"])):  # fmt: skip
        if time.monotonic() > ends:
            yield "a child lives on"
            return
        time.sleep(0.5)


def strike(target: Target, folder: Path, fault: str, seed: str, stop_seconds: float) -> str:
    """Strike once, then do the work to its end; return what is wrong, or nothing."""
    work, chance = target.work, random.Random(seed)
    number, seconds = chance.randrange(target.num_writes), chance.uniform(0, target.seconds)
    room, has_disk = int(chance.random() * target.kib), fault in ("full", "readonly")
    moments = {"stop": ["by time"], "readonly": ["by time", "at a write"]}
    moments["kill"] = ["by time", "at a write", "inside a write"]
    moment = chance.choice(moments.get(fault, ["at a write"]))
    is_timed = moment == "by time"
    folder.mkdir()
    if has_disk:
        make_disk(fault, folder)
    work.begin(folder)
    call("sync", "-f", folder)  # what begins is no write of the work
    if fault == "full":
        call("mount", "-o", f"remount,size={used_kib(folder) + room + 4}k", folder)
    what = f"{fault} {moment}" if moment == "inside a write" else fault
    harm = make_harm("" if is_timed else what, number, folder, chance)
    log = folder.with_suffix(".log")
    child = fork(lambda: work.run(folder), log, strike=harm)
    if is_timed:
        time.sleep(seconds)
        if fault == "readonly":
            fail_disk(folder)
        else:
            os.kill(child, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault == "stop":
            time.sleep(stop_seconds)
            os.kill(child, signal.SIGCONT)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    is_wrong = code == UNTYPED or (code != 0 and fault in ("clock", "stop"))
    found = [f"{code}: {log.read_text()[-1500:]}"] if is_wrong else []
    if has_disk:
        mend_disk(fault, folder)
    if fault == "vanish":
        folder.mkdir(exist_ok=True)
        work.begin(folder)
    found += find_wrong(target, folder, child)
    if has_disk:
        unmount(folder)
    shutil.rmtree(folder, ignore_errors=True)
    target.ended[f"{moment}, ended with {code}"] += 1
    return " | ".join(found)


def used_kib(folder: Path) -> int:
    return int(subprocess.check_output(["du", "-sk", str(folder)]).split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=["kill"], choices=[*FAULTS, []])
    parser.add_argument("--work", nargs="*")
    parser.add_argument("--number", type=int, default=20)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--stop-seconds", type=float, default=150)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strike-") as scratch:
        from benchmarks.faults.works import make_works

        works = make_works(Path(scratch))
        for name in asked.work or works:
            target = Target.measure(works[name], Path(scratch, f"{name}-whole"))
            for fault in asked.faults:
                began, wrong = time.monotonic(), []
                target.ended.clear()
                for number in range(asked.number):
                    seed = f"{asked.seed} {name} {fault} {number}"
                    at = Path(scratch, f"{name}-{fault}-{number}")
                    if found := strike(target, at, fault, seed, asked.stop_seconds):
                        wrong.append({"seed": seed, "what": found})
                row = {"work": name, "fault": fault, "number": asked.number}
                row |= {"writes": target.num_writes, "ended": dict(target.ended), "wrong": wrong}
                row |= {"stop_seconds": asked.stop_seconds} if fault == "stop" else {}
                row["seconds"] = round(time.monotonic() - began)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

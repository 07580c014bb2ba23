"""How long the probe takes, and how far its rates move between probes in a row.

    python benchmarks/probe.py [--probes 3]

Writes `benchmarks/results/<date>-probe-<device>.json`. A rate moves by (largest - smallest) /
median over the probes; on an idle machine that should stay under 10%, or the profile says noisy.
Device time is that of the machine it runs on.
"""

import argparse
import datetime
import json
import os
import re
import statistics
import time
from pathlib import Path

from autotune.hardware.diagnosis import doctor
from autotune.hardware.probing import measure_rates, probe

RESULTS = Path(__file__).parent / "results"


def timed(call):
    begin = time.perf_counter()
    return call(), time.perf_counter() - begin


def measure(num_probes):
    _, doctor_seconds = timed(doctor)
    _, first_quick_seconds = timed(probe)
    _, quick_seconds = timed(probe)
    load_before = os.getloadavg()[0]
    probes = [timed(lambda: measure_rates(probe(), lambda _: None)) for _ in range(num_probes)]
    profiles = [profile for profile, _ in probes]
    rates = {
        rate.name: {"unit": rate.unit, "values": []}
        for profile in profiles
        for rate in profile.rates
    }
    for profile in profiles:
        for rate in profile.rates:
            rates[rate.name]["values"].append(rate.value)
    for rate in rates.values():
        rate["median"] = statistics.median(rate["values"])
        rate["moved"] = round((max(rate["values"]) - min(rate["values"])) / rate["median"], 4)
    profile = profiles[-1]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": profile.device.name,
        "host": profile.host.model_dump(
            mode="json", include={"cpu", "logical_cores", "memory_bytes", "system"}
        ),
        "versions": {name: version for name, version in profile.versions if version is not None},
        "load_before": round(load_before, 2),
        "doctor_seconds": round(doctor_seconds, 3),
        "quick_seconds_with_import_of_torch": round(first_quick_seconds, 3),
        "quick_seconds": round(quick_seconds, 3),
        "probe_seconds": [round(seconds, 2) for _, seconds in probes],
        "noisy": [profile.noisy for profile in profiles],
        "same_fingerprint": len({profile.fingerprint for profile in profiles}) == 1,
        "largest_move": max(rate["moved"] for rate in rates.values()),
        "rates": rates,
        "notes": sorted({note for profile in profiles for note in profile.notes}),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=3)
    result = measure(parser.parse_args().probes)
    device = re.sub(r"[^a-z0-9]+", "-", result["device"].lower()).strip("-")
    path = RESULTS / f"{result['date']}-probe-{device}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {key: value for key, value in result.items() if key not in ("versions", "host")},
            indent=1,
        )
    )
    print(path)


if __name__ == "__main__":
    main()

"""Numbers for people."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """1536 as "1.5 KiB"."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(count: float) -> str:
    """1.5e12 as "1.5 T"."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E")).rstrip()


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them: "350 µs", "42.0 ms", "3.14 s", "2 min 05 s"."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while number >= base and power + 1 < len(units):
        number, power = number / base, power + 1
    unit = units[power]
    return f"{number:.0f} {unit}" if number == int(number) else f"{_three_digits(number)} {unit}"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"

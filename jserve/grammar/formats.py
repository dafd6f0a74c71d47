"""`format` in JSON schemas, as an assertion: which names are enforced, and by what pattern.

What is not here is refused. The official suite's optional/format files decide: a name is here when
its pattern takes all their valid strings and none of the others.
"""

from __future__ import annotations

_H16 = "[0-9A-Fa-f]{1,4}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_BY_4 = "(?:0[48]|[2468][048]|[13579][26])"  # without 00
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # calendars disagree on 0000
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|(?:[0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
)
_ZERO_OFFSET = "(?:[Zz]|[+-]00:00)"
_OFFSET = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_TOKEN = r"(?:[^~/]|~[01])"


def _leap_seconds() -> str:
    """23:59:60 UTC in the zones that lie whole and half hours from it (RFC 3339, section 5.7)."""
    local = [f"23:59:60(?:\\.[0-9]+)?{_ZERO_OFFSET}"]
    for sign, plus_or_minus in ((1, r"\+"), (-1, "-")):
        for offset in range(30, 24 * 60, 30):
            minutes = (23 * 60 + 59 + sign * offset) % (24 * 60)
            zone = f"{plus_or_minus}{offset // 60:02}:{offset % 60:02}"
            local.append(f"{minutes // 60:02}:{minutes % 60:02}:60(?:\\.[0-9]+)?{zone}")
    return "|".join(local)


def _time() -> str:
    ordinary = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}"
    return f"(?:{ordinary}|{_leap_seconds()})"


def _ipv6() -> str:
    """RFC 4291, section 2.2."""
    last = f"(?:{_H16}:{_H16}|{_IPV4})"
    forms = [f"(?:{_H16}:){{6}}{last}"]
    for before in range(6):  # groups before ::, where at least two groups of 16 bits are left out
        head = f"(?:{_H16}(?::{_H16}){{0,{before - 1}}})?" if before else ""
        head = head if before < 2 else f"(?:(?:{_H16}:){{0,{before - 1}}}{_H16})?"
        forms.append(f"{head}::(?:{_H16}:){{{5 - before}}}{last}")
    forms.append(f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}")
    forms.append(f"(?:(?:{_H16}:){{0,6}}{_H16})?::")
    return "|".join(forms)


def _email() -> str:
    """RFC 5321, section 4.1.2: mailboxes of ASCII."""
    quoted = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
    domain = rf"{_LABEL}(?:\.{_LABEL})*"
    return rf"(?:{_ATOM}(?:\.{_ATOM})*|{quoted})@(?:{domain}|\[{_IPV4}\]|\[IPv6:(?:{_ipv6()})\])"


#: Enforced by llguidance itself as the suite wants it.
NATIVE_FORMATS = frozenset({"duration", "hostname", "ipv4", "uri", "uuid"})

#: Written as `pattern`.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_time()}$",
    "date-time": f"^{_DATE}[Tt]{_time()}$",
    "email": f"^(?:{_email()})$",
    "ipv6": f"^(?:{_ipv6()})$",
    "json-pointer": f"^(?:/{_TOKEN}*)*$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|(?:/{_TOKEN}*)*)$",
}

#: OpenAPI's names for integers, as schemas. 64 bits are more than llguidance's limits hold.
INTEGER_FORMATS = {
    **{f"int{n}": {"minimum": -(1 << n - 1), "maximum": (1 << n - 1) - 1} for n in (8, 16, 32)},
    **{f"uint{n}": {"minimum": 0, "maximum": (1 << n) - 1} for n in (8, 16, 32)},
    "uint": {"minimum": 0},
}

"""A report as JUnit XML, for what CI systems show of tests.

One suite for each check, with one case for each finding. JUnit has no `unproven`: such a case is
skipped, with `unproven` as its type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from xml.etree import ElementTree

from hvdenv.reports.render import clean
from hvdenv.reports.report import Finding, Report, Status

_ELEMENTS: dict[Status, str] = {
    "fail": "failure",
    "error": "error",
    "skip": "skipped",
    "unproven": "skipped",
}
_TOTALS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def render(report: Report) -> str:
    """The report as an XML document; whatever a program printed, it can be read."""
    root = ElementTree.Element("testsuites", name="hvdenv verify")
    for check in dict.fromkeys(finding.check for finding in report.findings):
        findings = [each for each in report.findings if each.check == check]
        _add_suite(root, report, check, _cases(findings))
    _count(root)
    del root.attrib["skipped"]  # the schema has it for suites only
    root.set("time", f"{report.seconds:.3f}")
    ElementTree.indent(root, " ")
    text = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_suite(
    root: ElementTree.Element, report: Report, name: str, cases: Iterable[ElementTree.Element]
) -> None:
    started = re.sub(r"([+-]\d\d)(\d\d)$", r"\1:\2", clean(report.started))
    words = {"name": clean(name), "hostname": clean(report.host), "timestamp": started}
    suite = ElementTree.SubElement(root, "testsuite", words)
    suite.append(_properties(report))
    suite.extend(cases)
    _count(suite)


def _properties(report: Report) -> ElementTree.Element:
    """What the report is about: readers of JUnit keep it for each suite."""
    element = ElementTree.Element("properties")
    known = {"verdict": report.verdict, "recipe": report.recipe, "prefix": report.prefix}
    for section in dict.fromkeys(row.section for row in report.table):
        proven = [row.name for row in report.table if row.section == section and row.proven]
        known[f"proven {section.lower()}"] = ", ".join(proven)
    for name, value in (*known.items(), *report.environment.items()):
        ElementTree.SubElement(element, "property", name=clean(name), value=clean(value))
    return element


def _cases(findings: list[Finding]) -> Iterator[ElementTree.Element]:
    seen: Counter[str] = Counter()
    for finding in findings:
        seen[finding.subject] += 1
        # CI systems keep one of several cases of one name, and not always the one that failed.
        number = f" ({seen[finding.subject]})" if seen[finding.subject] > 1 else ""
        words = {"classname": f"hvdenv.{clean(finding.check)}"}
        case = ElementTree.Element("testcase", words, name=clean(finding.subject) + number)
        case.append(_outcome(finding))
        yield case


def _outcome(finding: Finding) -> ElementTree.Element:
    parts = [finding.message, finding.evidence, finding.remedy and f"what to do: {finding.remedy}"]
    message = f"unproven: {finding.message}" if finding.status == "unproven" else finding.message
    if finding.status == "pass":
        element = ElementTree.Element("system-out")
    else:
        words = {"type": finding.status, "message": clean(message)}
        element = ElementTree.Element(_ELEMENTS[finding.status], words)
    element.text = clean("\n\n".join(part.rstrip("\n") for part in parts if part))
    return element


def _count(element: ElementTree.Element) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    for attribute, tag in _TOTALS.items():
        element.set(attribute, str(len(list(element.iter(tag)))))

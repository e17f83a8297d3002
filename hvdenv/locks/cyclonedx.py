"""The contents of an environment as a bill of materials: CycloneDX 1.6 in JSON.

It states (VEX) whether Horovod's published vulnerabilities are open in this environment.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid5

from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import (
    Component,
    ComponentType,
    Diff,
    Patch,
    PatchClassification,
    Pedigree,
)
from cyclonedx.model.impact_analysis import ImpactAnalysisState
from cyclonedx.model.vulnerability import (
    BomTarget,
    Vulnerability,
    VulnerabilityAnalysis,
    VulnerabilitySource,
)
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.specifiers import SpecifierSet

from hvdenv.locks.packages import Contents, Horovod, Package

# Namespace for serial numbers that are made from digests: any fixed UUID.
_NAMESPACE = "5b0a7c0e-6d0c-5b7e-9f0f-3c3f5f0d7a11"
# Horovod's published vulnerabilities, the releases that have them, and the patch that closes them.
# Source: NVD, and docs/explanation/security.md.
_VULNERABILITIES = ("CVE-2024-10190", "CVE-2026-31234")
_VULNERABLE = SpecifierSet(">=0.19,<=0.28.1")
_CLOSED_BY = "safe-rendezvous"


def render(contents: Contents) -> str:
    writer = make_outputter(_bill(contents), OutputFormat.JSON, SchemaVersion.V1_6)
    return writer.output_as_string(indent=1) + "\n"


def _bill(contents: Contents) -> Bom:
    root = Component(
        name=contents.name,
        type=ComponentType.APPLICATION,
        bom_ref="environment",
        properties=_properties(
            {
                "machine": contents.machine,
                "python": contents.python,
                **{f"toolchain:{name}": value for name, value in contents.toolchain.items()},
                **{
                    f"module:{name}": f"sha256:{digest}" if digest else "hash not known"
                    for name, digest in contents.modules.items()
                },
            }
        ),
    )
    tool = Component(name="hvdenv", version=contents.hvdenv or None, bom_ref="hvdenv")
    metadata = BomMetaData(component=root)
    metadata.tools.components.add(tool)
    # Left out if unknown; the library would insert the present time.
    created = datetime.fromisoformat(contents.created) if contents.created else None
    metadata.timestamp = created  # type: ignore[assignment]
    horovod = [_horovod(contents.horovod)] if contents.horovod else []
    bill = Bom(
        components=[*map(_package, contents.packages), *horovod],
        vulnerabilities=_vulnerabilities(contents.horovod) if contents.horovod else (),
        serial_number=uuid5(UUID(_NAMESPACE), contents.digest),
        metadata=metadata,
    )
    bill.register_dependency(root, bill.components)
    return bill


def _package(package: Package) -> Component:
    qualifiers = {"build": package.build} if package.build else {}
    if package.kind == "conda" and package.url:
        folder, _, file = package.url.rpartition("/")
        channel, _, subdir = folder.rpartition("/")
        kind = "conda" if file.endswith(".conda") else "tar.bz2"
        qualifiers |= {"channel": channel.rpartition("/")[2], "subdir": subdir, "type": kind}
    system = "conda" if package.kind == "conda" else "pypi"
    link = ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(package.url))
    return Component(
        name=package.name,
        version=package.version,
        bom_ref=f"{package.kind}:{package.name}",
        purl=PackageURL(system, None, package.name, package.version, qualifiers),
        hashes=_hashes(package.sha256),
        external_references=[link] if package.url else [],
        properties=_properties({"from": "modules or the system" if package.kind == "site" else ""}),
    )


def _horovod(horovod: Horovod) -> Component:
    properties = {
        **{f"variable:{name}": value for name, value in horovod.variables.items()},
        **{f"patch:{name}": f"sha256:{digest}" for name, digest in horovod.patches.items()},
    }
    return Component(
        name="horovod",
        version=horovod.version,
        bom_ref="horovod",
        purl=PackageURL("pypi", None, "horovod", horovod.version),
        hashes=_hashes(horovod.wheel),
        pedigree=_pedigree(horovod) if horovod.source else None,
        properties=_properties(properties),
    )


def _pedigree(horovod: Horovod) -> Pedigree:
    """The source archive that Horovod was built from, and its patches."""
    version, unofficial = horovod.version, PatchClassification.UNOFFICIAL
    file = {"file_name": f"horovod-{version}.tar.gz"}
    archive = Component(
        name="horovod",
        version=version,
        bom_ref="horovod-source",
        purl=PackageURL("pypi", None, "horovod", version, file),
        hashes=_hashes(horovod.source),
    )
    return Pedigree(
        ancestors=[archive],
        # A path in hvdenv's own source.
        patches=[
            Patch(type=unofficial, diff=Diff(url=XsUri(f"hvdenv/knowledge/patches/{name}.toml")))
            for name in horovod.patches
        ],
        notes="built from source; hashes of the patches and flags of the build are properties",
    )


def _vulnerabilities(horovod: Horovod) -> list[Vulnerability]:
    """What is known of Horovod's vulnerabilities in this environment."""
    if horovod.version not in _VULNERABLE:
        return []
    if digest := horovod.patches.get(_CLOSED_BY):
        state = ImpactAnalysisState.RESOLVED_WITH_PEDIGREE
        detail = f"closed by the patch {_CLOSED_BY} (sha256:{digest})"
    else:
        state = ImpactAnalysisState.EXPLOITABLE
        detail = (
            "open: anyone who reaches the ports of horovodrun --gloo, of elastic jobs or of"
            " horovod.run() can run code as its user; ranks of mpirun and srun do not use them"
        )
    return [
        Vulnerability(
            id=name,
            bom_ref=name,
            source=VulnerabilitySource(
                name="NVD", url=XsUri(f"https://nvd.nist.gov/vuln/detail/{name}")
            ),
            analysis=VulnerabilityAnalysis(state=state, detail=detail),
            affects=[BomTarget(ref="horovod")],
        )
        for name in _VULNERABILITIES
    ]


def _hashes(sha256: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _properties(values: dict[str, str]) -> list[Property]:
    """The properties that have a value, under hvdenv's own names."""
    return [Property(name=f"hvdenv:{name}", value=value) for name, value in values.items() if value]

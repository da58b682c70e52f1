package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The parts of a software bill of materials that are written (SPDX 2.3, spdx.github.io/spdx-spec/v2.3).
type (
	bill struct {
		Version   string      `json:"spdxVersion"`
		License   string      `json:"dataLicense"`
		ID        string      `json:"SPDXID"`
		Name      string      `json:"name"`
		Namespace string      `json:"documentNamespace"`
		Creation  creation    `json:"creationInfo"`
		Packages  []component `json:"packages"`
		Relations []relation  `json:"relationships"`
	}
	creation struct {
		Created  string   `json:"created"`
		Creators []string `json:"creators"`
	}
	component struct {
		ID        string     `json:"SPDXID"`
		Name      string     `json:"name"`
		Version   string     `json:"versionInfo"`
		Location  string     `json:"downloadLocation"`
		Analyzed  bool       `json:"filesAnalyzed"`
		Checksums []checksum `json:"checksums,omitempty"`
		Refs      []ref      `json:"externalRefs,omitempty"`
	}
	checksum struct {
		Algorithm string `json:"algorithm"`
		Value     string `json:"checksumValue"`
	}
	ref struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	relation struct {
		Of   string `json:"spdxElementId"`
		Type string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
)

// Bill returns the software bill of materials of an image as JSON: the binaries' Go modules and the Debian packages.
// created is a time as RFC 3339 has it; the same image and time give the same bytes.
func (o Options) Bill(digest, created string) ([]byte, error) {
	parts := map[string]component{}
	add := func(name, version, locator string, sums ...checksum) {
		parts[locator] = component{Name: name, Version: version, Location: "NOASSERTION", Checksums: sums,
			Refs: []ref{{"PACKAGE-MANAGER", "purl", locator}}}
	}
	for _, arch := range slices.Sorted(maps.Keys(o.Binaries)) {
		info, err := buildinfo.ReadFile(o.Binaries[arch])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", o.Binaries[arch], err)
		}
		add("stdlib", strings.TrimPrefix(info.GoVersion, "go"), "pkg:golang/stdlib@"+strings.TrimPrefix(info.GoVersion, "go"))
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			add(m.Path, m.Version, "pkg:golang/"+m.Path+"@"+m.Version)
		}
		if !o.Tools {
			continue
		}
		packages, err := Packages(arch)
		if err != nil {
			return nil, err
		}
		for _, p := range packages {
			add(p.Name, p.Version, fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s&distro=bookworm", p.Name, p.Version, arch),
				checksum{"SHA256", p.SHA256})
		}
	}
	b := bill{Version: "SPDX-2.3", License: "CC0-1.0", ID: "SPDXRef-DOCUMENT", Name: "fairlead",
		Namespace: "https://fairlead.dev/spdx/" + digest,
		Creation:  creation{created, []string{"Organization: Fairlead", "Tool: fairlead deploy/image"}},
		Packages: []component{{ID: "SPDXRef-image", Name: "fairlead", Version: o.Revision, Location: "NOASSERTION",
			Refs: []ref{{"PACKAGE-MANAGER", "purl", "pkg:oci/fairlead@" + digest}}}},
		Relations: []relation{{"SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-image"}},
	}
	for i, locator := range slices.Sorted(maps.Keys(parts)) {
		p := parts[locator]
		p.ID = fmt.Sprintf("SPDXRef-%d", i+1)
		b.Packages = append(b.Packages, p)
		b.Relations = append(b.Relations, relation{"SPDXRef-image", "CONTAINS", p.ID})
	}
	return json.MarshalIndent(b, "", "  ")
}

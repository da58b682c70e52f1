package deploy

import (
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	"helm.sh/helm/v4/pkg/strvals"
	"sigs.k8s.io/yaml"
)

// Release states which installation a chart is rendered for.
type Release struct {
	Name, Namespace string
	Files           []string // of values, each going before those before it
	Set             []string // name=value, as Helm's --set has it, going before files
}

// Render returns the manifests that Helm would install of the chart in a folder, one YAML stream. Values that the
// chart's schema refuses are an error that names them.
func Render(folder string, r Release) (string, error) {
	c, err := loader.Load(folder)
	if err != nil {
		return "", fmt.Errorf("load the chart %s: %w", folder, err)
	}
	chartValues, err := r.values()
	if err != nil {
		return "", err
	}
	values, err := util.ToRenderValues(c, chartValues,
		common.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(c, values)
	if err != nil {
		return "", err
	}
	return join(files), nil
}

// values merges what the release's files and settings say.
func (r Release) values() (map[string]any, error) {
	all := map[string]any{}
	for _, name := range r.Files {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		v := map[string]any{}
		if err := yaml.Unmarshal(text, &v); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		all = loader.MergeMaps(all, v)
	}
	for _, s := range r.Set {
		if err := strvals.ParseInto(s, all); err != nil {
			return nil, fmt.Errorf("--set %s: %w", s, err)
		}
	}
	return all, nil
}

// order is that of the chart's files in the stream: an agent's rights and configuration come before it.
var order = []string{"access.yaml", "configuration.yaml", "agents.yaml", "migrate.yaml"}

// join makes one stream of the chart's files.
func join(files map[string]string) string {
	var names []string
	for name, text := range files {
		if strings.HasSuffix(name, ".yaml") && strings.TrimSpace(text) != "" {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		return slices.Index(order, path.Base(a)) - slices.Index(order, path.Base(b))
	})
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "---\n%s\n", strings.TrimSpace(files[name]))
	}
	return b.String()
}

package config

import (
	"encoding/json"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/spf13/pflag"
)

// A process that reads what an agent chose by a configuration decides as that does, whatever it came from.
func TestChosenIsReadAsTheAgentDecides(t *testing.T) {
	for name, c := range map[string]*Config{
		"flags": must(t, "", "--source", "manifests", "--node", "A", "--mode", "auto", "--policy-mode", "Enforce",
			"--network-mode", "Own", "--network-run-folder", "run", "--cluster-cidr", "10.244.0.0/16"),
		"file": must(t, kubeadm, "--node", "a"),
		"ours": must(t, "apiVersion: "+APIVersion+"\nkind: "+Kind+"\nmode: auto\npolicy: {resolvers: []}\n", "--node",
			"a"),
		"schedule": must(t, head+"mode: ipvs\nipvs: {scheduler: sh}\n", "--node", "a"),
	} {
		for _, plane := range []string{"nftables", "ipvs"} {
			chosen, err := c.Chosen("a", plane, "ebpf")
			if err != nil {
				t.Fatal(err)
			}
			text, err := json.Marshal(chosen)
			if err != nil {
				t.Fatal(err)
			}
			var again Config
			if err := json.Unmarshal(text, &again); err != nil {
				t.Fatal(err)
			}
			if same, err := json.Marshal(&again); err != nil || string(same) != string(text) {
				t.Errorf("%s: %v\n%s\n%s", name, err, same, text)
			}
			if again.Own.Mode != plane || again.Own.Policy.Engine != "ebpf" || again.Server != c.Server {
				t.Errorf("%s: %+v", name, again.Own)
			}
			for _, path := range []string{again.Own.Source, again.Proxy.ClientConnection.Kubeconfig,
				again.Own.Network.RunFolder, again.Own.Network.CNIFolder} {
				if path != "" && !filepath.IsAbs(path) {
					t.Errorf("%s: path %s of another folder", name, path)
				}
			}
			want, err := c.Resolve()
			if err != nil {
				t.Fatal(err)
			}
			want.Node = "a"
			if got, err := again.Resolve(); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s, %s: %v\n%+v\n%+v", name, plane, err, got, want)
			}
			if !reflect.DeepEqual(again.Options(), c.Options()) || !reflect.DeepEqual(again.ResolvePolicies(want),
				c.ResolvePolicies(want)) || !reflect.DeepEqual(again.ResolveNetwork(want), c.ResolveNetwork(want)) {
				t.Errorf("%s: %+v", name, again)
			}
		}
	}
}

func TestFlagsThatDecide(t *testing.T) {
	for flag, want := range map[string]bool{"--mode=ebpf": true, "--config=f": true, "--source=d": true,
		"--kubeconfig=f": true, "--node=a": true, "--network-run-folder=d": false, "--other=x": false} {
		var f Flags
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		f.AddDecisions(fs)
		fs.String("other", "", "")
		if f.Decide() {
			t.Error("none is set")
		}
		if err := fs.Parse([]string{flag}); err != nil || f.Decide() != want {
			t.Errorf("%s: %v, %v", flag, f.Decide(), err)
		}
	}
}

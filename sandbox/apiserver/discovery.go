package apiserver

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
)

// Version is what the server says that it is. It behaves as one of that version as far as it goes.
var Version = version.Info{Major: "1", Minor: "37", GitVersion: "v1.37.0+fairlead.lab"}

// discover answers what there is, and reports whether that was asked. Always as JSON, which every client takes.
func discover(w http.ResponseWriter, path string) bool {
	var response any
	switch prefix, group, _ := strings.Cut(path, "/"); {
	case path == "version":
		response = Version
	case path == "api":
		response = metav1.APIVersions{TypeMeta: metav1.TypeMeta{Kind: "APIVersions"}, Versions: []string{"v1"}}
	case path == "apis":
		response = groups()
	case prefix == "api" || prefix == "apis":
		l := resourceList(group)
		if len(l.APIResources) == 0 {
			return false
		}
		response = l
	default:
		return false
	}
	w.Header().Set("Content-Type", runtime.ContentTypeJSON)
	json.NewEncoder(w).Encode(response)
	return true
}

// groups lists the groups, of one version each.
func groups() metav1.APIGroupList {
	l := metav1.APIGroupList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIGroupList"}}
	for _, r := range resources() {
		v := metav1.GroupVersionForDiscovery{GroupVersion: r.GroupVersion().String(), Version: r.Version}
		known := slices.ContainsFunc(l.Groups, func(g metav1.APIGroup) bool { return g.Name == r.Group })
		if r.Group != "" && !known {
			l.Groups = append(l.Groups, metav1.APIGroup{Name: r.Group, Versions: []metav1.GroupVersionForDiscovery{v},
				PreferredVersion: v})
		}
	}
	return l
}

// resourceList lists a group's resources.
func resourceList(groupVersion string) metav1.APIResourceList {
	l := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "APIResourceList"},
		GroupVersion: groupVersion}
	for _, r := range resources() {
		if r.GroupVersion().String() == groupVersion {
			l.APIResources = append(l.APIResources, metav1.APIResource{Name: r.Resource,
				SingularName: strings.ToLower(string(r.kind)), Kind: string(r.kind),
				Namespaced: r.namespaced, Verbs: metav1.Verbs{"get", "list", "watch"}})
		}
	}
	return l
}

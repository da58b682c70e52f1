package apiserver

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
)

// query is what a request wants to see.
type query struct {
	watch, bookmarks bool
	initial          bool          // begin with what is there
	end              bool          // say when that has been told
	from             uint64        // else begin after this resource version
	timeout          time.Duration // 0: none
	limit            int           // of a list: how many objects, 0 for all
	after            string        // of a list: begin behind the object of that key
	sees             func(*state) bool
}

// parse reads a request's parameters (metav1.ListOptions). A list that may be of any version is always whole, as an API
// server answers from its cache.
func parse(v url.Values, at resourcePath) (q query, err error) {
	if q.sees, err = selection(v, at); err != nil {
		return q, err
	}
	q.watch, q.bookmarks = on(v, "watch"), on(v, "allowWatchBookmarks")
	if t := v.Get("timeoutSeconds"); t != "" {
		seconds, err := strconv.ParseUint(t, 10, 31)
		if err != nil {
			return q, apierrors.NewBadRequest("timeoutSeconds: " + err.Error())
		}
		q.timeout = time.Duration(seconds) * time.Second
	}
	if rv := v.Get("resourceVersion"); rv != "" {
		if q.from, err = strconv.ParseUint(rv, 10, 64); err != nil {
			return q, apierrors.NewBadRequest("resourceVersion: " + err.Error())
		}
	}
	if l := v.Get("limit"); l != "" && v.Get("resourceVersion") != "0" {
		limit, err := strconv.ParseUint(l, 10, 31)
		if err != nil {
			return q, apierrors.NewBadRequest("limit: " + err.Error())
		}
		q.limit, q.after = int(limit), v.Get("continue")
	}
	q.end = on(v, "sendInitialEvents")
	if q.end && (!q.watch || v.Get("resourceVersionMatch") != string(metav1.ResourceVersionMatchNotOlderThan)) {
		return q, reject(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid,
			"sendInitialEvents needs watch=true and resourceVersionMatch=NotOlderThan")
	}
	q.initial = q.end || q.from == 0 && !v.Has("sendInitialEvents")
	return q, nil
}

// on reads a parameter as apimachinery does: there, and not false (runtime.Convert_Slice_string_To_bool).
func on(v url.Values, name string) bool {
	s := v.Get(name)
	return v.Has(name) && s != "false" && s != "0"
}

// selection returns which objects a request sees: those of the path, by label and by field.
func selection(v url.Values, at resourcePath) (func(*state) bool, error) {
	byLabel, err := labels.Parse(v.Get("labelSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest("labelSelector: " + err.Error())
	}
	byField, err := fields.ParseSelector(v.Get("fieldSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest("fieldSelector: " + err.Error())
	}
	for _, r := range byField.Requirements() {
		if !at.selectable(r.Field) {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("fieldSelector: field %q of a %s can't be selected", r.Field,
				at.kind))
		}
	}
	return func(v *state) bool {
		o := v.object
		return (at.namespace == "" || o.GetNamespace() == at.namespace) && (at.name == "" || o.GetName() == at.name) &&
			(byLabel.Empty() || byLabel.Matches(labels.Set(o.GetLabels()))) &&
			(byField.Empty() || byField.Matches(fieldsOf(o)))
	}, nil
}

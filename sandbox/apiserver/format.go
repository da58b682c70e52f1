package apiserver

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"mime"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// format is a way to write objects down. What item gives is an object as lists hold it; the others frame such bytes.
type format struct {
	index  int
	media  string // content type of an object and of a list
	stream string // content type of a watch
	item   func(any) ([]byte, error)
	object func(metav1.TypeMeta, []byte) []byte
	list   func(metav1.TypeMeta, metav1.ListMeta, [][]byte) []byte
	event  func(watch.EventType, []byte) []byte // around what object gave
}

var formats = []*format{
	{0, runtime.ContentTypeJSON, runtime.ContentTypeJSON, json.Marshal,
		func(_ metav1.TypeMeta, b []byte) []byte { return b }, jsonList, jsonEvent},
	{1, runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf + ";stream=watch", protoItem, protoObject, protoList,
		protoEvent},
}

// negotiate picks the first format that the Accept header (RFC 9110, 12.5.1) names, weights aside: clients name the one
// they prefer first. Tables are passed over, since clients that ask for them take plain objects too. It returns nil
// where the client takes none of ours.
func negotiate(accept string) *format {
	if accept == "" {
		return formats[0]
	}
	for clause := range strings.SplitSeq(accept, ",") {
		media, params, err := mime.ParseMediaType(clause)
		if err != nil || params["as"] != "" {
			continue
		}
		for _, f := range formats {
			if media == f.media || media == "application/*" || media == "*/*" {
				return f
			}
		}
	}
	return nil
}

func jsonList(t metav1.TypeMeta, m metav1.ListMeta, items [][]byte) []byte {
	b := fmt.Appendf(nil, `{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":%q},"items":[`, t.Kind, t.APIVersion,
		m.ResourceVersion)
	for i, item := range items {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, item...)
	}
	return append(b, "]}\n"...)
}

func jsonEvent(t watch.EventType, object []byte) []byte {
	b := fmt.Appendf(make([]byte, 0, len(object)+40), `{"type":%q,"object":`, t)
	return append(append(b, object...), "}\n"...)
}

// protoItem is an object's own message, without a word on its kind.
func protoItem(o any) ([]byte, error) {
	m, ok := o.(interface{ Marshal() ([]byte, error) })
	if !ok {
		return nil, fmt.Errorf("%T has no protobuf form", o)
	}
	return m.Marshal()
}

// protoObject puts a message into the envelope that says its kind: four bytes, and a runtime.Unknown
// (k8s.io/apimachinery/pkg/runtime/generated.proto).
func protoObject(t metav1.TypeMeta, message []byte) []byte {
	u := runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: t.APIVersion, Kind: t.Kind}, Raw: message}
	b := make([]byte, 4+u.Size())
	copy(b, "k8s\x00")
	must(u.MarshalTo(b[4:]))
	return b
}

// protoList relies on what every list's message is alike in: field 1 is its metadata, field 2 its items.
func protoList(t metav1.TypeMeta, m metav1.ListMeta, items [][]byte) []byte {
	meta := must(m.Marshal())
	size := len(meta) + 10
	for _, item := range items {
		size += len(item) + 10
	}
	b := protoField(make([]byte, 0, size), 1, meta)
	for _, item := range items {
		b = protoField(b, 2, item)
	}
	return protoObject(t, b)
}

// protoField appends a field of bytes: its number and wire type 2, its length, the bytes.
func protoField(b []byte, number byte, value []byte) []byte {
	b = append(b, number<<3|2)
	b = binary.AppendUvarint(b, uint64(len(value)))
	return append(b, value...)
}

// protoEvent is a metav1.WatchEvent without an envelope, behind its length in four bytes
// (apimachinery/pkg/util/framer).
func protoEvent(t watch.EventType, object []byte) []byte {
	e := metav1.WatchEvent{Type: string(t), Object: runtime.RawExtension{Raw: object}}
	b := make([]byte, 4+e.Size())
	binary.BigEndian.PutUint32(b, uint32(e.Size()))
	must(e.MarshalTo(b[4:]))
	return b
}

// must is for encodings of values that are made here and can always be encoded.
func must[T any](v T, err error) T {
	if err != nil {
		panic(fmt.Sprintf("apiserver: encode: %v", err))
	}
	return v
}

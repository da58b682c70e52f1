{{- /* fairlead.selector gives the labels that choose the agents. */ -}}
{{- define "fairlead.selector" -}}
app.kubernetes.io/name: fairlead
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* fairlead.labels gives the labels of every object. */ -}}
{{- define "fairlead.labels" -}}
{{ include "fairlead.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* fairlead.name names what belongs to no namespace: one release for each way of choosing nodes. */ -}}
{{- define "fairlead.name" -}}
{{- if eq .Release.Name "fairlead" }}fairlead{{ else }}fairlead-{{ .Release.Name }}{{ end }}
{{- end }}

{{- define "fairlead.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* fairlead.capabilities gives what a mode needs of root's powers; docs/install.md says how that was found. */ -}}
{{- define "fairlead.capabilities" -}}
{{- $c := list "NET_ADMIN" }}
{{- if hasPrefix "iptables" .Values.mode | or (eq .Values.mode "auto") }}{{ $c = append $c "NET_RAW" }}{{ end }}
{{- if eq .Values.takeOver "Remove" }}{{ $c = append $c "SYS_PTRACE" }}{{ end }}
{{- toYaml $c }}
{{- end }}

{{- /* fairlead.privileged is "true" where the agent writes sysctls while it serves. */ -}}
{{- define "fairlead.privileged" -}}
{{- or .Values.privileged (has .Values.mode (list "ipvs" "userspace" "ebpf")) }}
{{- end }}

{{- /* fairlead.container gives what both containers have in common. */ -}}
{{- define "fairlead.container" -}}
image: {{ include "fairlead.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - name: FAIRLEAD_NODE
    valueFrom:
      fieldRef:
        fieldPath: spec.nodeName
  - name: KUBERNETES_SERVICE_HOST
    value: {{ .Values.apiServer.host | quote }}
  - name: KUBERNETES_SERVICE_PORT
    value: {{ .Values.apiServer.port | quote }}
{{- end }}

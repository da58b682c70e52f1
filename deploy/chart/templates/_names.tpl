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

{{- /* fairlead.capabilities gives what a mode needs of root's powers; docs/reference/permissions.md says how that was found. */ -}}
{{- define "fairlead.capabilities" -}}
{{- $c := list "NET_ADMIN" }}
{{- if has .Values.mode (list "auto" "iptables" "iptables-legacy") }}{{ $c = append $c "NET_RAW" }}{{ end }}
{{- if eq .Values.mode "ebpf" }}{{ $c = concat $c (list "BPF" "PERFMON") }}{{ end }}
{{- if eq .Values.mode "userspace" }}{{ $c = concat $c (list "NET_BIND_SERVICE" "SYS_ADMIN") }}{{ end }}
{{- if eq .Values.network.mode "Own" }}{{ $c = append $c "SYS_ADMIN" | uniq }}{{ end }}
{{- toYaml $c }}
{{- end }}

{{- /* fairlead.tools is "true" where a mode may call the tools of iptables, which share a lock with the node's. */ -}}
{{- define "fairlead.tools" -}}
{{- or (hasPrefix "iptables" .Values.mode) (eq .Values.mode "auto") }}
{{- end }}

{{- /* fairlead.confinement gives a container's profiles: AppArmor's default one, and SELinux's for containers, deny what two modes do. */ -}}
{{- define "fairlead.confinement" -}}
{{- $armor := .Values.appArmorProfile }}
{{- if or (eq .Values.mode "userspace") (eq .Values.network.mode "Own") }}{{ $armor = $armor | default (dict "type" "Unconfined") }}{{ end }}
{{- $linux := .Values.seLinuxOptions }}
{{- if or (has .Values.mode (list "ebpf" "userspace")) (ne .Values.network.mode "None") }}{{ $linux = $linux | default (dict "type" "spc_t" "level" "s0") }}{{ end }}
{{- with $armor }}
appArmorProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $linux }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
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
  {{- with .Values.network.runFolder }}
  - name: FAIRLEAD_RUN_FOLDER # where commands find the agent
    value: {{ . | quote }}
  {{- end }}
{{- end }}

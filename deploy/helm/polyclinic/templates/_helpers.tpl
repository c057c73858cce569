{{/* Call each with a dict: root, the chart's context; part, "server" or "client"; values, that part's values. */}}

{{- define "polyclinic.name" -}}
{{ printf "%s-%s" (.root.Release.Name | trunc 45 | trimSuffix "-") .part }}
{{- end }}

{{- define "polyclinic.selector" -}}
app.kubernetes.io/name: flwr-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "polyclinic.labels" -}}
{{ include "polyclinic.selector" . }}
app.kubernetes.io/part-of: polyclinic
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What both pods have: the account and the walls of docker/compose.yaml. */}}
{{- define "polyclinic.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 30
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Not at each start: it would open private keys and ledgers (mode 600) to the group.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "polyclinic.container" -}}
image: {{ printf "%s:%s" .values.image.repository (.values.image.tag | default .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .values.image.pullPolicy }}
# After a refusal the program waits, unready, until a file of its folder changes, and starts again in this container, so
# that sessions of kubectl exec go on. After 15 minutes without a change it ends. There is no liveness probe: it would end
# the program before anyone has read the reason.
args: [start, /data, --wait-on-refusal]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
readinessProbe:
  exec: { command: [flwr-{{ .part }}, health, /data] }
  initialDelaySeconds: 15
  periodSeconds: 30
  timeoutSeconds: 15
resources: {{- toYaml .values.resources | nindent 2 }}
{{- with .values.env }}
env:
  {{- range $name, $value := . }}
  - { name: {{ $name }}, value: {{ $value | quote }} }
  {{- end }}
{{- end }}
{{- with .values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* One claim of a StatefulSet, which stays when the release is removed. Call with name and volume. */}}
{{- define "polyclinic.claim" -}}
- metadata: { name: {{ .name }} }
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .volume.storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources: { requests: { storage: {{ .volume.size | quote }} } }
{{- end }}

{{- define "boxcal.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "boxcal.selector" -}}
app.kubernetes.io/name: boxcal
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "boxcal.labels" -}}
{{ include "boxcal.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "boxcal.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Helm reads numbers as float64 and prints 50000000 as 5e+07, which is not an integer to the service. */}}
{{- define "boxcal.number" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "boxcal.environment" -}}
{{- range $name, $value := .Values.settings }}
- name: BOXCAL_{{ $name }}
  value: {{ include "boxcal.number" $value | quote }}
{{- end }}
{{- with .Values.alarmSecret }}
- name: BOXCAL_ALARM_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: key
{{- end }}
{{- if .Values.allowAnonymous }}
- name: BOXCAL_ALLOW_ANONYMOUS
  value: "1"
{{- end }}
{{- if and .Values.sharedClaim .Values.sharedBucket.url }}
{{- fail "validation sets have one place: set sharedClaim or sharedBucket.url" }}
{{- end }}
{{- if or .Values.sharedClaim .Values.sharedBucket.url }}
- name: BOXCAL_SHARED_DIR
  value: {{ .Values.sharedBucket.url | default "/var/lib/boxcal-shared" }}
{{- end }}
{{- if .Values.fitWorkers }}
- name: BOXCAL_FITS
  value: queue
{{- end }}
{{- if .Values.database.secret }}
- name: BOXCAL_MIGRATE
  value: "off"
- name: BOXCAL_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.secret }}
      key: url
{{- end }}
{{- end }}

{{- define "boxcal.credentials" -}}
{{- with .Values.sharedBucket.secret }}
- secretRef:
    name: {{ . }}
{{- end }}
{{- end }}

{{- define "boxcal.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "boxcal.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "boxcal.scheduling" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

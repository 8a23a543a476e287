{{/* What several templates share. A part takes a list: the root context, and the component where it matters. */}}

{{- define "kvstore.labels" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- if gt (len .) 1 }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}
{{- end -}}

{{- define "kvstore.metadata" -}}
name: {{ (index . 0).Release.Name }}{{ if gt (len .) 1 }}-{{ index . 1 }}{{ end }}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "kvstore.labels" . | nindent 2 }}
{{- end -}}

{{/* What every pod has first: no rights, not root, a seccomp profile. */}}
{{- define "kvstore.pod" -}}
serviceAccountName: {{ .Release.Name }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "kvstore.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end -}}

{{- define "kvstore.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{- define "kvstore.claim" -}}
{{ .Values.root.existingClaim | default (printf "%s-root" .Release.Name) }}
{{- end -}}

{{/* Arguments and environment of everything that is a client of etcd. */}}
{{- define "kvstore.etcdArgs" -}}
- --root=/mnt/kv
- --etcd=$(KVSTORE_ETCD)
- --etcd-ca=/etc/kvstore/etcd/ca.crt
- --etcd-cert=/etc/kvstore/etcd/tls.crt
- --etcd-key=/etc/kvstore/etcd/tls.key
{{- end -}}

{{- define "kvstore.etcdEnv" -}}
- name: KVSTORE_ETCD
  valueFrom:
    configMapKeyRef:
      name: {{ .Release.Name }}
      key: etcd
{{- end -}}

{{/* Volumes by name: secrets, the root, and a little memory for temporary files. */}}
{{- define "kvstore.secretVolume" -}}
- name: {{ index . 0 }}
  secret:
    secretName: {{ index . 1 }}
    defaultMode: 0440
{{- end -}}

{{- define "kvstore.rootVolume" -}}
- name: root
  persistentVolumeClaim:
    claimName: {{ include "kvstore.claim" . }}
{{- end -}}

{{- define "kvstore.tmpVolume" -}}
- name: tmp
  emptyDir:
    medium: Memory
    sizeLimit: 64Mi
{{- end -}}

{{/* Ends of a NetworkPolicy: the pods of one component; the namespace of Prometheus. */}}
{{- define "kvstore.pods" -}}
- podSelector:
    matchLabels:
      {{- include "kvstore.labels" . | nindent 6 }}
{{- end -}}

{{- define "kvstore.monitoring" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ .Values.monitoringNamespace }}
{{- end -}}

{{- define "kvstore.ports" -}}
{{- range . }}
- protocol: TCP
  port: {{ . }}
{{- end }}
{{- end -}}

{{- define "tq.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tq.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tq.selector" -}}
app.kubernetes.io/name: {{ include "tq.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "tq.labels" -}}
{{ include "tq.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tq-service
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tq.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tq.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tq.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whether there are services of role storage. */}}
{{- define "tq.isSplit" -}}
{{- if gt (int .Values.storage.replicas) 0 }}true{{ end -}}
{{- end -}}

{{/* Address for clients and storage services: each of several controllers, otherwise the Service of ready ones. Kubernetes
     resolves $(POD_NAMESPACE). */}}
{{- define "tq.address" -}}
{{- $full := include "tq.fullname" . -}}
{{- $addresses := list -}}
{{- range $number := until (int .Values.controller.replicas) -}}
{{- $addresses = append $addresses (printf "%s-controller-%d.%s-controller.$(POD_NAMESPACE).svc:50051" $full $number $full) -}}
{{- end -}}
{{- ternary ($addresses | join ",") (printf "%s.$(POD_NAMESPACE).svc:50051" $full) (gt (len $addresses) 1) -}}
{{- end -}}

{{/* Whether only the leader is ready, so Kubernetes cannot rely on readiness for anything else. */}}
{{- define "tq.isLeaderReadyAlone" -}}
{{- if and (gt (int .Values.controller.replicas) 1) (eq .Values.controller.readiness "leader") }}true{{ end -}}
{{- end -}}

{{/* Settings that the chart sets itself, and the values that set them. */}}
{{- define "tq.ownSettings" -}}
role: storage.replicas
host: host
port: no value (it is 50051)
bulk_port: no value (it is 50052)
advertise: no value (it is the name of the pod)
controller: no value (it is the name of the Service, or of the controllers' pods)
storage_id: no value (it is the name of the pod, or of its node)
grace_seconds: graceSeconds
log_level: logLevel
log_format: logFormat
data_dir: controller.persistence or storage.persistence
durability: controller.durability or storage.durability
checkpoint_dir: checkpoint.persistence or checkpoint.existingClaim
max_bytes: controller.quotaGiB or storage.quotaGiB
shared_memory: sharedMemory.hostPath
shared_memory_dir: sharedMemory.hostPath
insecure: insecure
tls_cert: tls.enabled and tls.secretName
tls_key: tls.enabled and tls.secretName
tls_ca: tls.enabled and tls.secretName
tls_client_ca: tls.clientCertificates
auth_tokens_file: auth.enabled and auth.secretName
internal_secret_file: internalSecret.secretName
metrics_port: monitoring.enabled
metrics_host: monitoring.enabled and host
journal: journal.etcd
cluster: journal.cluster
lease_seconds: journal.leaseSeconds
etcd_user: journal.user
etcd_password_file: journal.passwordSecretName
etcd_ca: journal.tlsSecretName
etcd_cert: journal.tlsSecretName and journal.clientCertificate
etcd_key: journal.tlsSecretName and journal.clientCertificate
mirror: mirror.url
mirror_copies: mirror.copies
mirror_required: mirror.required
mirror_memory_bytes: mirror.memoryGiB
mirror_offered_bytes: mirror.offeredGiB
{{- end -}}

{{/* Values that contradict each other. */}}
{{- define "tq.check" -}}
{{- $v := .Values -}}
{{- if eq (include "tq.fullname" .) "tq" -}}
{{- fail "a Service named tq makes Kubernetes set TQ_PORT=tcp://... in other pods, which clients and services would read as a setting: give the release another name, or set fullnameOverride" -}}
{{- end -}}
{{- if and $v.insecure (or $v.tls.enabled $v.auth.enabled) -}}
{{- fail "insecure=true is for a service without TLS and tokens, but tls.enabled or auth.enabled is set: leave one of the two out" -}}
{{- end -}}
{{- if not (or $v.insecure (and $v.tls.enabled $v.auth.enabled)) -}}
{{- fail "every pod that reaches the service could read and clear everything: set tls.enabled=true and auth.enabled=true (values-secured.yaml; README.md shows how to create the Secrets), or insecure=true if the network is trusted" -}}
{{- end -}}
{{- $own := fromYaml (include "tq.ownSettings" .) -}}
{{- range $where, $settings := dict "settings" $v.settings "controller.settings" $v.controller.settings "storage.settings" $v.storage.settings -}}
{{- range $name, $_ := $settings -}}
{{- if hasKey $own $name -}}
{{- fail (printf "%s.%s: the chart sets this one itself: use %s" $where $name (get $own $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $v.controller.replicas) 1) (not $v.journal.etcd) -}}
{{- fail (printf "got controller.replicas %d without journal.etcd: controllers find each other through a shared journal; set journal.etcd to the etcd members, or use 1" (int $v.controller.replicas)) -}}
{{- end -}}
{{- if and $v.journal.etcd (not (include "tq.isSplit" .)) -}}
{{- fail "journal.etcd is for controllers without data: set storage.replicas (values-ha.yaml)" -}}
{{- end -}}
{{- if and $v.journal.etcd (not $v.controller.persistence.enabled) -}}
{{- fail "journal.etcd needs controller.persistence.enabled: each controller keeps snapshots on its own volume, and etcd has only the changes after them" -}}
{{- end -}}
{{- if ne (empty $v.journal.user) (empty $v.journal.passwordSecretName) -}}
{{- fail "got one of journal.user and journal.passwordSecretName; give both, or none" -}}
{{- end -}}
{{- if and $v.journal.clientCertificate (not $v.journal.tlsSecretName) -}}
{{- fail "journal.clientCertificate needs journal.tlsSecretName, the Secret that contains it" -}}
{{- end -}}
{{- if and $v.mirror.url (not (include "tq.isSplit" .)) -}}
{{- fail "mirror.url is for several storage services, one of which takes over: set storage.replicas to 2 or more" -}}
{{- end -}}
{{- if gt (int $v.mirror.required) (int $v.mirror.copies) -}}
{{- fail (printf "mirror.required: got %d, expected at most mirror.copies, %d" (int $v.mirror.required) (int $v.mirror.copies)) -}}
{{- end -}}
{{- if and $v.mirror.memoryGiB (not $v.mirror.url) -}}
{{- fail "mirror.memoryGiB is for puts that the mirror has: set mirror.url, or leave it 0" -}}
{{- end -}}
{{- if gt (int $v.mirror.memoryGiB) (int $v.storage.quotaGiB) -}}
{{- fail (printf "mirror.memoryGiB: got %d, expected at most storage.quotaGiB, %d: the quota covers all puts, including those in memory" (int $v.mirror.memoryGiB) (int $v.storage.quotaGiB)) -}}
{{- end -}}
{{- range $name, $part := dict "controller" $v.controller "storage" $v.storage -}}
{{- $stores := or (eq $name "storage") (not (include "tq.isSplit" $)) -}}
{{- if and $stores $part.persistence.enabled (not (and $v.mirror.url (eq $name "storage"))) (lt (int $part.persistence.sizeGiB) (int (add $part.quotaGiB 1))) -}}
{{- fail (printf "%s.persistence.sizeGiB: got %d, expected at least %d: the quota of %d GiB and 1 GiB for the journal" $name (int $part.persistence.sizeGiB) (int (add $part.quotaGiB 1)) (int $part.quotaGiB)) -}}
{{- end -}}
{{- end -}}
{{- if eq $v.storage.kind "DaemonSet" -}}
{{- if $v.tls.enabled -}}
{{- fail "storage.kind DaemonSet advertises the IP addresses of pods, which a certificate cannot name: use StatefulSet, or no TLS" -}}
{{- end -}}
{{- if gt (int $v.storage.replicas) 1 -}}
{{- fail (printf "got storage.replicas %d with storage.kind DaemonSet, expected 1: there is one on each node that storage.nodeSelector chooses" (int $v.storage.replicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.checkpoint.existingClaim $v.checkpoint.persistence.enabled -}}
{{- fail "got both of checkpoint.existingClaim and checkpoint.persistence.enabled: leave one of the two out" -}}
{{- end -}}
{{- if and $v.checkpoint.enabled (not $v.controller.persistence.enabled) (not $v.checkpoint.persistence.enabled) (not $v.checkpoint.existingClaim) -}}
{{- fail "checkpoint.enabled needs a place: set controller.persistence.enabled, checkpoint.persistence.enabled or checkpoint.existingClaim" -}}
{{- end -}}
{{- end -}}

{{- define "tq.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "tq.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Common to every pod of this chart. */}}
{{- define "tq.pod" -}}
serviceAccountName: {{ include "tq.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- include "tq.podSecurityContext" . | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Scheduling of a service, from controller or storage. */}}
{{- define "tq.placement" -}}
{{- with .part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .part.affinity }}
affinity: {{- toYaml .part.affinity | nindent 2 }}
{{- else if and (ne .part.antiAffinity "none") (not .isOnEachNode) }}
affinity:
  podAntiAffinity:
    {{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (fromYaml (include "tq.selector" .))) }}
    {{- if eq .part.antiAffinity "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - {{ toYaml $term | nindent 8 | trim }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm: {{- toYaml $term | nindent 10 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Pod names used in other variables: first in `env`, since $(NAME) refers only to earlier ones. */}}
{{- define "tq.namespaceEnv" -}}
- {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
{{- end -}}

{{/* Common to controller and storage services. */}}
{{- define "tq.serviceEnv" -}}
{{- $v := .root.Values -}}
{{- include "tq.namespaceEnv" . }}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: TQ_ROLE, value: {{ .role }}}
- {name: TQ_HOST, value: {{ $v.host | quote }}}
- {name: TQ_GRACE_SECONDS, value: {{ $v.graceSeconds | quote }}}
- {name: TQ_LOG_LEVEL, value: {{ $v.logLevel }}}
- {name: TQ_LOG_FORMAT, value: {{ $v.logFormat }}}
{{- if .hasDataDir }}
- {name: TQ_DATA_DIR, value: /var/lib/tq_service}
{{- if not .isMember }}
- {name: TQ_DURABILITY, value: {{ .part.durability }}}
{{- end }}
{{- end }}
{{- if ne .role "controller" }}
- {name: TQ_BULK_PORT, value: "50052"}
- {name: TQ_MAX_BYTES, value: {{ printf "%dGiB" (int .part.quotaGiB) }}}
{{- if $v.sharedMemory.hostPath }}
- {name: TQ_SHARED_MEMORY_DIR, value: /run/tq_service}
{{- else }}
- {name: TQ_SHARED_MEMORY, value: "off"}
{{- end }}
{{- end }}
{{- if $v.insecure }}
- {name: TQ_INSECURE, value: "true"}
{{- end }}
{{- if $v.tls.enabled }}
- {name: TQ_TLS_CERT, value: /etc/tq-service/tls/tls.crt}
- {name: TQ_TLS_KEY, value: /etc/tq-service/tls/tls.key}
- {name: TQ_TLS_CA, value: /etc/tq-service/tls/ca.crt}
{{- if $v.tls.clientCertificates }}
- {name: TQ_TLS_CLIENT_CA, value: /etc/tq-service/tls/ca.crt}
{{- end }}
{{- end }}
{{- if $v.auth.enabled }}
- {name: TQ_AUTH_TOKENS_FILE, value: /etc/tq-service/auth/tokens.toml}
{{- end }}
{{- if include "tq.isSplit" .root }}
- {name: TQ_INTERNAL_SECRET_FILE, value: /etc/tq-service/internal/secret}
{{- end }}
{{- if $v.monitoring.enabled }}
- {name: TQ_METRICS_PORT, value: "9464"}
- {name: TQ_METRICS_HOST, value: {{ $v.host | quote }}}
{{- end }}
{{- if .isMember }}
- {name: TQ_JOURNAL, value: "etcd://{{ join "," $v.journal.etcd }}"}
- {name: TQ_CLUSTER, value: {{ default (printf "$(POD_NAMESPACE).%s" (include "tq.fullname" .root)) $v.journal.cluster | quote }}}
- {name: TQ_LEASE_SECONDS, value: {{ $v.journal.leaseSeconds | quote }}}
{{- if $v.journal.user }}
- {name: TQ_ETCD_USER, value: {{ $v.journal.user | quote }}}
- {name: TQ_ETCD_PASSWORD_FILE, value: /etc/tq-service/etcd-user/password}
{{- end }}
{{- if $v.journal.tlsSecretName }}
- {name: TQ_ETCD_CA, value: /etc/tq-service/etcd/ca.crt}
{{- if $v.journal.clientCertificate }}
- {name: TQ_ETCD_CERT, value: /etc/tq-service/etcd/tls.crt}
- {name: TQ_ETCD_KEY, value: /etc/tq-service/etcd/tls.key}
{{- end }}
{{- end }}
{{- end }}
{{- if and $v.mirror.url (eq .role "storage") }}
- {name: TQ_MIRROR, value: {{ $v.mirror.url | quote }}}
- {name: TQ_MIRROR_COPIES, value: {{ $v.mirror.copies | quote }}}
- {name: TQ_MIRROR_REQUIRED, value: {{ $v.mirror.required | quote }}}
{{- if $v.mirror.memoryGiB }}
- {name: TQ_MIRROR_MEMORY_BYTES, value: {{ printf "%dGiB" (int $v.mirror.memoryGiB) }}}
{{- end }}
{{- if $v.mirror.offeredGiB }}
- {name: TQ_MIRROR_OFFERED_BYTES, value: {{ printf "%dGiB" (int $v.mirror.offeredGiB) }}}
{{- end }}
{{- end }}
{{- $settings := merge (deepCopy .part.settings) $v.settings }}
{{- if ne .role "storage" }}
{{- $settings = merge $settings (dict "max_samples" (mul 1500000 (int $v.controller.memoryGiB) | toString)) }}
{{- end }}
{{- if $v.auth.enabled }}
{{- $settings = merge $settings (dict "audit_repeat_seconds" "10") }}
{{- end }}
{{- range $name, $value := $settings }}
- {name: TQ_{{ upper $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/* Secrets of etcd and of the mirror, by volume name. */}}
{{- define "tq.engineSecrets" -}}
{{- $v := .root.Values -}}
{{- if and .isMember $v.journal.tlsSecretName }}
etcd: {{ $v.journal.tlsSecretName | quote }}
{{- end }}
{{- if and .isMember $v.journal.passwordSecretName }}
etcd-user: {{ $v.journal.passwordSecretName | quote }}
{{- end }}
{{- if and $v.mirror.url $v.mirror.secretName (eq .role "storage") }}
mirror: {{ $v.mirror.secretName | quote }}
{{- end }}
{{- end -}}

{{/* Secrets are mounted as directories without subPath, so changes reach the files and the service reloads them. */}}
{{- define "tq.serviceMounts" -}}
{{- $v := .root.Values -}}
{{- if .hasDataDir }}
- {name: data, mountPath: /var/lib/tq_service}
{{- end }}
{{- if .hasCheckpoints }}
- {name: checkpoints, mountPath: /var/lib/tq_service_checkpoints}
{{- end }}
{{- if and (ne .role "controller") $v.sharedMemory.hostPath }}
- {name: shared-memory, mountPath: /run/tq_service}
{{- end }}
{{- if $v.tls.enabled }}
- {name: tls, mountPath: /etc/tq-service/tls, readOnly: true}
{{- end }}
{{- if $v.auth.enabled }}
- {name: auth, mountPath: /etc/tq-service/auth, readOnly: true}
{{- end }}
{{- if include "tq.isSplit" .root }}
- {name: internal, mountPath: /etc/tq-service/internal, readOnly: true}
{{- end }}
{{- range $name, $secret := fromYaml (include "tq.engineSecrets" .) }}
- {name: {{ $name }}, mountPath: /etc/tq-service/{{ $name }}, readOnly: true}
{{- end }}
{{- with .part.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tq.serviceVolumes" -}}
{{- $v := .root.Values -}}
{{- if and .hasCheckpoints $v.checkpoint.existingClaim }}
- {name: checkpoints, persistentVolumeClaim: {claimName: {{ $v.checkpoint.existingClaim | quote }}}}
{{- end }}
{{- if and (ne .role "controller") $v.sharedMemory.hostPath }}
- {name: shared-memory, hostPath: {path: {{ $v.sharedMemory.hostPath | quote }}, type: Directory}}
{{- end }}
{{- if $v.tls.enabled }}
- {name: tls, secret: {secretName: {{ $v.tls.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- if $v.auth.enabled }}
- {name: auth, secret: {secretName: {{ $v.auth.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- if include "tq.isSplit" .root }}
- {name: internal, secret: {secretName: {{ $v.internalSecret.secretName | quote }}, defaultMode: 0440}}
{{- end }}
{{- range $name, $secret := fromYaml (include "tq.engineSecrets" .) }}
- {name: {{ $name }}, secret: {secretName: {{ $secret | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .part.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Kubernetes' gRPC probe does not support TLS. `alive` checks that the process runs and accepts connections. With TLS it
     only connects: a handshake would fail with an expired certificate and restart all pods at once, which would not help. */}}
{{- define "tq.alive" -}}
{{- if .root.Values.tls.enabled -}}
tcpSocket: {port: grpc}
{{- else -}}
grpc: {port: 50051, service: ""}
{{- end }}
timeoutSeconds: 4
{{- end -}}

{{/* Readiness verifies the certificate like clients do, so they are not sent to a pod that they cannot use. */}}
{{- define "tq.ready" -}}
{{- if .root.Values.tls.enabled -}}
exec: {command: [tq-service, health, {{ with .ready }}--service, {{ . }}, {{ end }}--timeout, "4"]}
timeoutSeconds: 6
{{- else -}}
grpc: {port: 50051, service: {{ .ready | quote }}}
timeoutSeconds: 4
{{- end }}
{{- end -}}

{{- define "tq.probes" -}}
startupProbe:
  {{- include "tq.alive" . | nindent 2 }}
  periodSeconds: 2
  failureThreshold: {{ div .root.Values.startupSeconds 2 }}
readinessProbe:
  {{- include "tq.ready" . | nindent 2 }}
  periodSeconds: {{ ternary 5 2 .root.Values.tls.enabled }}
  failureThreshold: 2
livenessProbe:  # one minute, since a shorter stall may resolve without a restart
  {{- include "tq.alive" . | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
{{- end -}}

{{/* Memory of a service in GiB: stored data, the state of a controller, and 1 for the process and its in-flight puts and
     reads. */}}
{{- define "tq.memoryGiB" -}}
{{- $v := .root.Values -}}
{{- $state := ternary 0 $v.controller.memoryGiB (eq .role "storage") -}}
{{- $stored := ternary 0 .part.quotaGiB (eq .role "controller") -}}
{{- $offered := 0 -}}
{{- if and (eq .role "storage") $v.mirror.url -}}
{{- $stored = default $stored $v.mirror.memoryGiB -}}
{{- $offered = $v.mirror.offeredGiB -}}
{{- end -}}
{{- $sum := add 1 $state $stored $offered -}}
{{- if eq .role "storage" -}}
{{- if and $v.storage.memoryGiB (lt (int $v.storage.memoryGiB) (int $sum)) -}}
{{- fail (printf "storage.memoryGiB: got %d, expected at least %d: stored data, memory offered to the object store, and 1 GiB; or use 0, which is that sum" (int $v.storage.memoryGiB) (int $sum)) -}}
{{- end -}}
{{- default $sum $v.storage.memoryGiB -}}
{{- else -}}
{{- $sum -}}
{{- end -}}
{{- end -}}

{{/* The container of a service. */}}
{{- define "tq.serviceContainer" -}}
{{- $memory := printf "%dGi" (int (include "tq.memoryGiB" .)) -}}
name: tq-service
image: {{ include "tq.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [serve]
ports:
  - {name: grpc, containerPort: 50051}
{{- if ne .role "controller" }}
  - {name: bulk, containerPort: 50052}
{{- end }}
{{- if .root.Values.monitoring.enabled }}
  - {name: metrics, containerPort: 9464}
{{- end }}
{{ include "tq.probes" . }}
{{- $resources := deepCopy .part.resources }}
{{- $request := dig "requests" "memory" "" $resources }}
{{- $limit := dig "limits" "memory" "" $resources }}
{{- /* If only one is set, it is used for both: with the computed sum, the limit could be below the request. */}}
{{- $memories := dict "requests" (dict "memory" (coalesce $request $limit $memory)) "limits" (dict "memory" (coalesce $limit $request $memory)) }}
resources: {{- toYaml (merge $resources $memories) | nindent 2 }}
securityContext: {{- include "tq.securityContext" . | nindent 2 }}
{{- end -}}

{{/* A claim of volumeClaimTemplates, whose labels must never change. */}}
{{- define "tq.claim" -}}
metadata:
  name: {{ .name }}
  labels: {{- include "tq.selector" . | nindent 4 }}
spec:
  accessModes: [{{ .claim.accessMode }}]
  {{- with .claim.storageClass }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources: {requests: {storage: {{ .claim.sizeGiB }}Gi}}
{{- end -}}

{{/* Common to client pods: the test, the checkpoint, the page. `token` is a key of auth.clientSecretName. */}}
{{- define "tq.clientEnv" -}}
{{- $v := .root.Values -}}
{{- include "tq.namespaceEnv" . }}
- {name: TQ_ADDRESS, value: {{ include "tq.address" .root | quote }}}
{{- if $v.tls.enabled }}
- {name: TQ_TLS_CA, value: /etc/tq-service/tls/ca.crt}
{{- if $v.tls.clientCertificates }}
- {name: TQ_TLS_CERT, value: /etc/tq-service/tls/tls.crt}
- {name: TQ_TLS_KEY, value: /etc/tq-service/tls/tls.key}
{{- end }}
{{- end }}
{{- if $v.auth.enabled }}
- {name: TQ_TOKEN_FILE, value: /etc/tq-service/auth/{{ .token }}}
{{- end }}
{{- end -}}

{{- define "tq.clientMounts" -}}
{{- if or .root.Values.tls.enabled .root.Values.auth.enabled }}
volumeMounts:
  {{- if .root.Values.tls.enabled }}
  - {name: tls, mountPath: /etc/tq-service/tls, readOnly: true}
  {{- end }}
  {{- if .root.Values.auth.enabled }}
  - {name: auth, mountPath: /etc/tq-service/auth, readOnly: true}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tq.clientVolumes" -}}
{{- $v := .root.Values -}}
{{- if or $v.tls.enabled $v.auth.enabled }}
volumes:
  {{- if $v.tls.enabled }}
  - {name: tls, secret: {secretName: {{ default $v.tls.secretName $v.tls.clientSecretName | quote }}, defaultMode: 0440}}
  {{- end }}
  {{- if $v.auth.enabled }}
  - {name: auth, secret: {secretName: {{ $v.auth.clientSecretName | quote }}, defaultMode: 0440, items: [{key: {{ .token }}, path: {{ .token }}}]}}
  {{- end }}
{{- end }}
{{- end -}}

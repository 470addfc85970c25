{{/* Name of the release's objects; the release's own name where that says ppojob already. */}}
{{- define "ppojob.name" -}}
{{- if contains "ppojob" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-ppojob" (.Release.Name | trunc 33 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "ppojob.selectorLabels" -}}
app.kubernetes.io/name: ppojob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "ppojob.labels" -}}
{{ include "ppojob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "ppojob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "ppojob.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The Secret that the operator fills with its own certificates. */}}
{{- define "ppojob.certificateSecret" -}}
{{- printf "%s-certificates" (include "ppojob.name" .) -}}
{{- end -}}

{{/* The Secret with certificates that somebody else makes: one of the user's, or that which cert-manager fills for us.
Empty: the operator makes its own. */}}
{{- define "ppojob.givenSecret" -}}
{{- if .Values.certificates.certManager.issuerRef -}}
{{- .Values.certificates.existingSecret | default (printf "%s-tls" (include "ppojob.name" .)) -}}
{{- else -}}
{{- .Values.certificates.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The Secret that the operator makes for the key of the dashboards' tokens. It is not the release's, because jobs that
go on running after an uninstall need it when the operator comes back. */}}
{{- define "ppojob.dashboardSecret" -}}
{{- printf "%s-dashboard-key" (include "ppojob.name" .) -}}
{{- end -}}

{{/* Role or ClusterRole: what the operator may do where its jobs are. */}}
{{- define "ppojob.roleKind" -}}
{{- if .Values.watchNamespaces -}}Role{{- else -}}ClusterRole{{- end -}}
{{- end -}}

{{/* Name of the Role in each of the watched namespaces, or of the ClusterRole. */}}
{{- define "ppojob.roleName" -}}
{{- if .Values.watchNamespaces -}}{{- include "ppojob.name" . -}}{{- else -}}{{- include "ppojob.clusterWideName" . -}}{{- end -}}
{{- end -}}

{{/* Selects the watched namespaces. Empty: the operator serves all. */}}
{{- define "ppojob.namespaceSelector" -}}
{{- if .Values.watchNamespaces -}}
matchExpressions:
  - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson .Values.watchNamespaces }}}
{{- else if include "ppojob.chosenSelector" . -}}
{{- toYaml .Values.namespaceSelector -}}
{{- end -}}
{{- end -}}

{{/* namespaceSelector as JSON, after the checks that a schema cannot explain. Empty: it has no requirement. */}}
{{- define "ppojob.chosenSelector" -}}
{{- with .Values.namespaceSelector -}}
{{- if or .matchLabels .matchExpressions -}}
{{- if $.Values.watchNamespaces -}}
{{- fail (printf "watchNamespaces is %s and namespaceSelector is %s: name the namespaces or select them by their labels, and remove the other value (--set watchNamespaces=null or --set namespaceSelector=null)" (toJson $.Values.watchNamespaces) (toJson .)) -}}
{{- end -}}
{{- range $number, $one := .matchExpressions -}}
{{- $has := gt (len (default list $one.values)) 0 -}}
{{- $needs := has $one.operator (list "In" "NotIn") -}}
{{- if and $needs (not $has) -}}
{{- fail (printf "namespaceSelector.matchExpressions[%d] is %s: operator %s needs values: name one at least, or use Exists or DoesNotExist" $number (toJson $one) $one.operator) -}}
{{- end -}}
{{- if and $has (not $needs) -}}
{{- fail (printf "namespaceSelector.matchExpressions[%d] is %s: operator %s compares no values: remove them, or use In or NotIn" $number (toJson $one) $one.operator) -}}
{{- end -}}
{{- end -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Objects without a namespace: another release must not meet them. */}}
{{- define "ppojob.clusterWideName" -}}
{{- printf "%s-%s" .Release.Namespace (include "ppojob.name" .) -}}
{{- end -}}

{{/* The Lease by which the replicas agree on one leader; the operator makes it. */}}
{{- define "ppojob.lease" -}}
{{- printf "%s-leader" (include "ppojob.name" .) -}}
{{- end -}}

{{- define "ppojob.leaseTimes" -}}
{{- with .Values.leaderElection -}}
{{- if not (and (lt (int .retryPeriodSeconds) (int .renewDeadlineSeconds)) (lt (int .renewDeadlineSeconds) (int .leaseDurationSeconds))) -}}
{{- fail (printf "leaderElection: retryPeriodSeconds (%v) < renewDeadlineSeconds (%v) < leaseDurationSeconds (%v) must hold, or two replicas could lead at the same time" .retryPeriodSeconds .renewDeadlineSeconds .leaseDurationSeconds) -}}
{{- end -}}
- {name: PPOJOB_LEASE_DURATION, value: {{ .leaseDurationSeconds | quote }}}
- {name: PPOJOB_LEASE_RENEW_DEADLINE, value: {{ .renewDeadlineSeconds | quote }}}
- {name: PPOJOB_LEASE_RETRY_PERIOD, value: {{ .retryPeriodSeconds | quote }}}
{{- end -}}
{{- end -}}

{{/* A new pod comes before an old one goes. Only from an operator that knows no Lease (chart 0.1) the old one goes first:
both would decide at the same time. */}}
{{- define "ppojob.strategy" -}}
{{- $old := lookup "apps/v1" "Deployment" .Release.Namespace (include "ppojob.name" .) -}}
{{- if and $old (not (contains "PPOJOB_LEASE_NAME" (toJson $old.spec.template))) -}}
type: Recreate
{{- else -}}
type: RollingUpdate
rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
{{- end -}}
{{- end -}}

{{/* Where notifications go. The operator checks the address too; here a mistake is found before anything is installed. */}}
{{- define "ppojob.notifications" -}}
{{- with .Values.notifications -}}
{{- if .enabled -}}
{{- if not (or .url .existingSecret) -}}
{{- fail "notifications.enabled is true, and there is no address: set notifications.url, or notifications.existingSecret with key url" -}}
{{- end -}}
{{- if and .url (not (regexMatch "^https?://[^/?#@\\s]+([/?][^#\\s]*)?$" .url)) -}}
{{- fail (printf "notifications.url is %q: it must begin with http:// or https://, name a host, and have no user, spaces or fragment; put credentials into key authorization of notifications.existingSecret" .url) -}}
{{- end -}}
- {name: PPOJOB_NOTIFICATION_URL, value: {{ .url | quote }}}
{{- if .existingSecret }}
- {name: PPOJOB_NOTIFICATION_FOLDER, value: /etc/ppojob/notifications}
{{- end }}
- {name: PPOJOB_NOTIFICATION_TYPES, value: {{ join "," .types | quote }}}
- {name: PPOJOB_NOTIFICATION_CLUSTER, value: {{ .clusterName | quote }}}
- {name: PPOJOB_NOTIFICATION_TIMEOUT, value: {{ .timeoutSeconds | quote }}}
- {name: PPOJOB_NOTIFICATION_GIVE_UP_AFTER, value: {{ .giveUpAfterSeconds | int | quote }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The mounted Secret of the receiver, by its name. Empty: none is mounted. */}}
{{- define "ppojob.notificationSecret" -}}
{{- if .Values.notifications.enabled -}}{{- .Values.notifications.existingSecret -}}{{- end -}}
{{- end -}}

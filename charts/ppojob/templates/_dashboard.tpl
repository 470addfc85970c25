{{/*
A dashboard of Grafana, as JSON, from its short form. A panel has a kind (timeseries, stat or state-timeline), what its
axis counts and in which unit, and queries; `empty` is shown where they find nothing. Time series are 8 wide and 8 high,
statistics 4 by 4; a panel may set its `width`.
Variables take several values and All, which Grafana joins to a regular expression: selectors compare them with =~.
*/}}
{{- define "ppojob.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "$datasource" -}}
{{- $selected := .selected -}}
{{- $variables := list (dict "name" "datasource" "type" "datasource" "query" "prometheus" "label" "Prometheus") -}}
{{- range .variables -}}
{{- $all := dict "selected" true "text" (list "All") "value" (list "$__all") -}}
{{- $variables = append $variables (dict "name" .name "label" .label "type" "query" "datasource" $source "query" (dict "query" .query "refId" .name) "refresh" 2 "multi" true "includeAll" true "allValue" ".*" "current" $all "sort" 1) -}}
{{- end -}}
{{- $panels := list -}}
{{- $id := 0 -}}
{{- $x := 0 -}}
{{- $y := 0 -}}
{{- range .rows -}}
{{- $id = add1 $id -}}
{{- $panels = append $panels (dict "id" $id "type" "row" "title" .title "collapsed" false "panels" list "gridPos" (dict "x" 0 "y" $y "w" 24 "h" 1)) -}}
{{- $x = 0 -}}
{{- $y = add1 $y -}}
{{- $height := 8 -}}
{{- range .panels -}}
{{- $id = add1 $id -}}
{{- $kind := default "timeseries" .kind -}}
{{- $height = ternary 4 8 (eq $kind "stat") -}}
{{- $width := int (default (ternary 4 8 (eq $kind "stat")) .width) -}}
{{- if gt (add $x $width) 24 -}}
{{- $x = 0 -}}
{{- $y = add $y $height -}}
{{- end -}}
{{- $targets := list -}}
{{- range $index, $query := .queries -}}
{{- $expression := $query.expr | replace "SELECTED" $selected -}}
{{- $targets = append $targets (dict "refId" (printf "Q%d" $index) "datasource" $source "expr" $expression "legendFormat" $query.legend) -}}
{{- end -}}
{{- $place := dict "x" $x "y" $y "w" $width "h" $height -}}
{{- $panels = append $panels (dict "id" $id "type" $kind "title" .title "description" (default "" .description) "datasource" $source "targets" $targets "gridPos" $place "fieldConfig" (dict "defaults" (include "ppojob.dashboard.field" . | fromJson) "overrides" list) "options" (include "ppojob.dashboard.options" . | fromJson)) -}}
{{- $x = add $x $width -}}
{{- end -}}
{{- $y = add $y $height -}}
{{- end -}}
{{- dict "uid" .uid "title" .title "tags" (list "ppojob") "links" (list (dict "type" "dashboards" "tags" (list "ppojob") "title" "PPOJob" "asDropdown" false "keepTime" true "includeVars" true)) "schemaVersion" 39 "editable" true "refresh" "30s" "time" (dict "from" "now-3h" "to" "now") "templating" (dict "list" $variables) "panels" $panels | toPrettyJson -}}
{{- end -}}

{{/* How a panel shows a value: its unit, the axis with its name and limits, the names of states, a line or an alarm. */}}
{{- define "ppojob.dashboard.field" -}}
{{- $field := dict "unit" .unit -}}
{{- range list "min" "max" "decimals" -}}
{{- if hasKey $ . -}}
{{- $_ := set $field . (get $ .) -}}
{{- end -}}
{{- end -}}
{{- if hasKey . "empty" -}}
{{- $_ := set $field "noValue" .empty -}}
{{- end -}}
{{- $kind := default "timeseries" .kind -}}
{{- if eq $kind "timeseries" -}}
{{- $custom := dict "axisLabel" .axis "fillOpacity" (ternary 30 0 (default false .stack)) "showPoints" "never" "spanNulls" false "stacking" (dict "mode" (ternary "normal" "none" (default false .stack)) "group" "A") -}}
{{- if hasKey . "threshold" -}}
{{- $_ := set $custom "thresholdsStyle" (dict "mode" "line") -}}
{{- end -}}
{{- $_ := set $field "custom" $custom -}}
{{- end -}}
{{- $alarm := default .threshold .alarm -}}
{{- if $alarm -}}
{{- $_ := set $field "thresholds" (dict "mode" "absolute" "steps" (list (dict "color" "green" "value" nil) (dict "color" "red" "value" $alarm))) -}}
{{- end -}}
{{- if .mappings -}}
{{- $colors := dict "Running" "green" "Succeeded" "blue" "Failed" "red" "Restarting" "orange" "Suspended" "purple" "Suspending" "purple" -}}
{{- $names := dict -}}
{{- range $value, $name := .mappings -}}
{{- $_ := set $names (toString $value) (dict "text" $name "color" (default "yellow" (get $colors $name))) -}}
{{- end -}}
{{- $_ := set $field "mappings" (list (dict "type" "value" "options" $names)) -}}
{{- end -}}
{{- $field | toJson -}}
{{- end -}}

{{- define "ppojob.dashboard.options" -}}
{{- $kind := default "timeseries" .kind -}}
{{- if eq $kind "stat" -}}
{{- dict "reduceOptions" (dict "calcs" (list "lastNotNull")) "colorMode" (ternary "background" "value" (hasKey . "alarm")) "graphMode" "area" "textMode" "value" | toJson -}}
{{- else if eq $kind "state-timeline" -}}
{{- dict "showValue" "auto" "mergeValues" true "legend" (dict "showLegend" false) | toJson -}}
{{- else -}}
{{- dict "legend" (dict "displayMode" "list" "placement" "bottom" "showLegend" true) "tooltip" (dict "mode" "multi" "sort" "desc") | toJson -}}
{{- end -}}
{{- end -}}

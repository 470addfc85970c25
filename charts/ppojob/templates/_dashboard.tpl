{{/* A dashboard of Grafana, as JSON, from its short form. Three panels a row of the grid, each 8 wide and 8 high. */}}
{{- define "ppojob.dashboard" -}}
{{- $source := dict "type" "prometheus" "uid" "$datasource" -}}
{{- $variables := list (dict "name" "datasource" "type" "datasource" "query" "prometheus" "label" "Prometheus") -}}
{{- range .variables -}}
{{- $variables = append $variables (dict "name" .name "type" "query" "datasource" $source "query" (dict "query" .query "refId" .name) "refresh" 2 "includeAll" true "allValue" ".*" "sort" 1) -}}
{{- end -}}
{{- $panels := list -}}
{{- $id := 0 -}}
{{- $y := 0 -}}
{{- range .rows -}}
{{- $id = add1 $id -}}
{{- $panels = append $panels (dict "id" $id "type" "row" "title" .title "collapsed" false "panels" list "gridPos" (dict "x" 0 "y" $y "w" 24 "h" 1)) -}}
{{- $y = add1 $y -}}
{{- range $number, $panel := .panels -}}
{{- $id = add1 $id -}}
{{- $targets := list -}}
{{- range $index, $query := $panel.queries -}}
{{- $targets = append $targets (dict "refId" (printf "Q%d" $index) "datasource" $source "expr" $query.expr "legendFormat" $query.legend) -}}
{{- end -}}
{{- $place := dict "x" (mul 8 (mod $number 3)) "y" (add $y (mul 8 (div $number 3))) "w" 8 "h" 8 -}}
{{- $panels = append $panels (dict "id" $id "type" "timeseries" "title" $panel.title "datasource" $source "targets" $targets "gridPos" $place "fieldConfig" (dict "defaults" (dict "unit" $panel.unit) "overrides" list)) -}}
{{- end -}}
{{- $y = add $y (mul 8 (div (add (len .panels) 2) 3)) -}}
{{- end -}}
{{- dict "uid" .uid "title" .title "tags" (list "ppojob") "schemaVersion" 39 "editable" true "refresh" "30s" "time" (dict "from" "now-3h" "to" "now") "templating" (dict "list" $variables) "panels" $panels | toPrettyJson -}}
{{- end -}}

{{- /* What search.js searches: of each page its address, title, headings and text. A script and no JSON, as file:// allows no fetch. */ -}}
{{- $pages := slice -}}
{{- range site.Params.sections -}}
{{- range (site.GetPage (printf "/%s" .)).RegularPages -}}
{{- $headings := slice -}}
{{- range findRESubmatch `(?s)<h[2-4] id="([^"]*)">(.*?)</h` .Content -}}
{{- $headings = $headings | append (dict "id" (index . 1) "text" (index . 2 | plainify | htmlUnescape)) -}}
{{- end -}}
{{- $pages = $pages | append (dict "url" (strings.TrimPrefix "/" .RelPermalink) "title" (partialCached "title.html" . .RelPermalink) "headings" $headings
  "text" (.Plain | htmlUnescape | replaceRE `\s+` " ")) -}}
{{- end -}}
{{- end -}}
window.pages = {{ $pages | jsonify }};

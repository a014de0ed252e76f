"""The template of the page, in Jinja. It is a Python module because Flower ships no .html file to the server app."""

from typing import Final

PAGE: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Run {{ name }}</title>
<style>
:root{color-scheme:light dark;--ink:#1b1b1b;--paper:#fff;--soft:#555;--head:#f4f4f4;--rule:#ccc;--good:#f0f6fb}
@media(prefers-color-scheme:dark){:root{--ink:#e4e4e4;--paper:#181a1b;--soft:#a8a8a8;--head:#26292b;--rule:#4a4a4a;
 --good:#16242e}}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:var(--ink);
 background:var(--paper);max-width:1120px;margin:0 auto;padding:24px 20px 80px}
h1{font-size:1.7em;margin:0 0 .3em}h2{font-size:1.25em;margin:2.2em 0 .5em;border-bottom:1px solid var(--rule)}
p{margin:.5em 0;max-width:75em}.small{color:var(--soft);font-size:.92em}
.headline{overflow-wrap:anywhere;padding:.6em 1em;border-left:6px solid #0072B2;background:var(--good)}
.missing{padding:.6em 1em;border-left:6px solid #999;background:var(--head)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:.6em 0;font-size:.86em;font-variant-numeric:tabular-nums}
th,td{padding:.28em .5em;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{background:var(--head);font-weight:600;text-align:center}
td:first-child{position:sticky;left:0;background:var(--paper);text-align:left;white-space:normal;min-width:8em}
table.wide{font-size:.8em}table.wide td,table.wide th{white-space:normal;padding:.28em .4em}
table.texts td{text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;max-width:60em}
img{max-width:100%;height:auto;display:block;margin:.6em 0}
summary{cursor:pointer;margin:.6em 0;font-weight:600}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15em 1.2em;margin:.8em 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:640px){dl{display:block}dt{margin-top:.4em;font-weight:600}}
</style></head>
<body>
<h1>Run {{ name }}</h1>
<div class="headline">{% for sentence in sentences %}<p>{{ sentence }}</p>{% endfor %}</div>
{% if missing %}<div class="missing"><b>This report is incomplete</b>{{ missing }}</div>{% endif %}
<div class="small">{{ glossary }}</div>
{% for title, parts in sections if parts|select|list %}
<h2>{{ title }}</h2>
{% for part in parts|select %}
{{ part }}
{% endfor %}
{% endfor %}
</body></html>
"""
PICTURE: Final = '<img src="data:image/png;base64,{}" alt="{}" title="{}">'
FOLDED: Final = "<details><summary>{}</summary>\n{}\n</details>"
FACT: Final = "<dt>{}</dt><dd>{}</dd>"

"""The template of the page, in Jinja. It is a Python module because Flower ships no .html file to the server app."""

from typing import Final

PAGE: Final = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Run {{ name }}</title>
<style>
:root{color-scheme:light dark;--ink:#1b1b1b;--paper:#fff;--soft:#555;--head:#f4f4f4;--rule:#ccc;--good:#f0f6fb;
 --dot:#333}
@media(prefers-color-scheme:dark){:root{--ink:#e4e4e4;--paper:#181a1b;--soft:#a8a8a8;--head:#26292b;--rule:#4a4a4a;
 --good:#16242e;--dot:#ddd}}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:var(--ink);
 background:var(--paper);max-width:1120px;margin:0 auto;padding:24px 20px 80px}
h1{font-size:1.7em;margin:0 0 .3em}h2{font-size:1.25em;margin:2.2em 0 .5em;border-bottom:1px solid var(--rule)}
p{margin:.5em 0;max-width:75em}.small{color:var(--soft);font-size:.92em}
.headline{overflow-wrap:anywhere;padding:.6em 1em;border-left:6px solid #0072B2;background:var(--good)}
.headline p:first-child{color:var(--soft)}
.copy{display:flex;gap:.5em;align-items:center}.copy code{overflow-x:auto;white-space:nowrap;user-select:all}
.copy button{flex:none}
abbr{text-decoration:underline dotted 1px;text-underline-offset:3px;cursor:help}
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
.examples{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26em),1fr));gap:1.6em 2.4em}
.legend{display:flex;flex-wrap:wrap;gap:.2em 1.2em}.legend i{display:inline-block;width:1.6em;height:.7em}
.legend u{position:static;display:inline-block;transform:none}
figure{margin:0;overflow-wrap:anywhere}figcaption{font-weight:600;margin-bottom:.3em}
figcaption span{display:block;font-weight:400}
.option{display:grid;grid-template-columns:minmax(4em,30%) 1fr;gap:.7em;align-items:center;margin:.45em 0}
.option>div:first-child{text-align:right;font-size:.86em;line-height:1.25;overflow-wrap:anywhere}
.track{border-left:1px solid var(--rule);padding-right:2.4em}
i{display:block;height:.72em;margin:1px 0;background:var(--bar)}
i s{display:block;margin-left:100%;padding-left:.35em;font:.7em/1 sans-serif;text-decoration:none;
 white-space:nowrap;overflow-wrap:normal}
.dots{position:relative;height:.9em}
u{position:absolute;top:.1em;width:.6em;height:.6em;border-radius:50%;box-sizing:border-box;
 border:2px solid var(--dot);background:var(--dot);transform:translateX(-50%);opacity:.75}
u.predicted{background:none}u.worst{--dot:#D55E00;opacity:1;z-index:1}
.sft{--bar:#8f8f8f}.ppo{--bar:#0072B2}.by{--bar:#56B4E9}.look-up{--bar:#d3c18c}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15em 1.2em;margin:.8em 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:640px){dl{display:block}dt{margin-top:.4em;font-weight:600}}
</style></head>
<body>
<h1>Run {{ name }}</h1>
<div class="headline">{% for sentence in sentences %}<p>{{ sentence }}</p>{% endfor %}
{% if again %}
<p class="copy"><code>{{ again }}</code>
<button onclick="navigator.clipboard.writeText(this.previousElementSibling.textContent)">Copy</button></p>
{% endif %}</div>
{% if missing %}<div class="missing"><b>This report is incomplete</b>{{ missing }}</div>{% endif %}
{% if examples %}
<h2>What the policy answers</h2>
<p class="small">{{ chosen }}</p>
<p class="small legend">{% for name, css in bars.items() %}<span><i class="{{ css }}"></i> {{ name }}</span>{% endfor %}
{% for name, css in dots.items() %}<span><u class="{{ css }}"></u> {{ name }}</span>{% endfor %}</p>
<div class="examples">
{% for example in examples %}
<figure><figcaption>{{ example.question }}<span class="small">{{ example.why }}</span></figcaption>
{% for row in example.rows %}
<div class="option"><div>{{ row.option }}</div><div class="track">
{% for bar in row.bars %}
<i class="{{ bars[bar.name] }}" style="width:{{ bar.percent|round(1) }}%" title="{{ bar.name }}">\
<s>{{ bar.text }}</s></i>
{% endfor %}
{% if row.dots %}<div class="dots">
{% for dot in row.dots %}
<u class="{{ 'worst' if dot.name == worst }}{{ ' predicted' if dot.name in example.predicted }}" \
style="left:{{ dot.percent|round(1) }}%" title="{{ dot.name }} {{ dot.text }}"></u>
{% endfor %}</div>{% endif %}
</div></div>
{% endfor %}
{% for name, text in example.unread.items() %}
<p class="small">{{ name }} wrote <q>{{ text }}</q>, which cannot be read.</p>
{% endfor %}
</figure>
{% endfor %}
</div>
{% endif %}
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

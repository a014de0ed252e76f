"""The template of the page, in Jinja. It is a Python module because Flower ships no .html file to the server app."""

from typing import Final

PAGE: Final = """\
{%- macro table(found) -%}
{% set spans = found.columns.values()|select|list %}
<div class="scroll"><table{{ {"class": found.css}|xmlattr }}>
<thead><tr>{% for title, names in found.columns.items() -%}
<th{{ {"class": "edge" if spans and loop.index > found.texts, "colspan": names|length or none,
 "rowspan": 2 if spans and not names}|xmlattr }}>{{ title }}</th>
{%- endfor %}</tr>
{% if spans %}
<tr>{% for names in spans %}{% for name in names -%}
<th{{ {"class": "edge" if loop.first}|xmlattr }}>{{ name }}</th>
{%- endfor %}{% endfor %}</tr>
{% endif %}
</thead>{% for title, rows in found.blocks %}<tbody>{% for row in rows %}<tr>
{%- if title and loop.first %}<th rowspan="{{ rows|length }}">{{ title }}</th>{% endif %}
{% for text in row -%}
{% set n = loop.index0 + (title != "") -%}
{% if n %}<td{{ {"class": found.classes[n]}|xmlattr }}>{{ text }}</td>{% else %}<th>{{ text }}</th>{% endif %}
{% endfor %}</tr>
{% endfor %}</tbody>{% endfor -%}
</table></div>
{%- if found.caption %}<p class="small">{{ found.caption }}</p>{% endif -%}
{%- endmacro -%}

{%- macro bullets(sentences) -%}
<ul>{% for sentence in sentences %}<li>{{ sentence }}</li>{% endfor %}</ul>
{%- endmacro -%}

{%- macro section(title) -%}
{% set content = caller()|trim %}{% if content %}<h2>{{ title }}</h2>
{{ content }}
{% endif %}
{%- endmacro -%}

{%- macro folded(title) -%}
{% set content = caller()|trim %}{% if content %}<details><summary>{{ title }}</summary>
{{ content }}
</details>
{% endif %}
{%- endmacro -%}

{%- macro picture(name) -%}
{% if name in pictures %}
<div class="scroll">
<img src="data:image/png;base64,{{ pictures[name][0]|base64 }}" alt="{{ pictures[name][1] }}" title="{{ name }}"></div>
{% endif %}
{%- endmacro -%}

<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Run {{ run.folder.resolve().name }}</title>
<style>
:root{color-scheme:light dark;--ink:#1b1b1b;--paper:#fff;--soft:#555;--head:#f4f4f4;--rule:#ccc;--good:#f0f6fb;
 --bad:#fdf3ec}
@media(prefers-color-scheme:dark){:root{--ink:#e4e4e4;--paper:#181a1b;--soft:#a8a8a8;--head:#26292b;--rule:#4a4a4a;
 --good:#16242e;--bad:#33231a}}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color:var(--ink);
 background:var(--paper);max-width:1120px;margin:0 auto;padding:24px 20px 80px}
h1{font-size:1.7em;margin:0 0 .3em}h2{font-size:1.25em;margin:2.2em 0 .5em;border-bottom:1px solid var(--rule)}
h3{font-size:1.05em;margin:1.4em 0 .4em}p{margin:.5em 0;max-width:75em}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:.6em 0;font-size:.86em;font-variant-numeric:tabular-nums}
th,td{padding:.28em .5em;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{background:var(--head);font-weight:600}thead th{text-align:center;white-space:pre}
tbody th,td.text{text-align:left;font-weight:400;background:none}
tbody th{position:sticky;left:0;background:var(--paper);white-space:normal;min-width:8em}
td.text{white-space:normal}
tbody+tbody tr:first-child>*{border-top:2px solid #888}td.edge,th.edge{border-left:1px solid #aaa}
table.wide{font-size:.8em}table.wide th,table.wide td{padding:.28em .42em}
sup{display:inline-block;width:0;line-height:0}
table.config td{white-space:pre-wrap;overflow-wrap:anywhere;max-width:60em}
img{max-width:100%;min-width:min(640px,180%);height:auto;display:block;margin:.6em 0}
summary{cursor:pointer;margin:.6em 0;font-weight:600}
.facts{display:grid;grid-template-columns:max-content 1fr;gap:.15em 1.2em;margin:.8em 0}
.facts dt{color:var(--soft)}.facts dd{margin:0;overflow-wrap:anywhere}
.verdict,.warning,.missing{padding:.6em 1em;margin:1em 0;border-left:6px solid #0072B2;background:var(--good)}
.verdict.none,.warning{border-color:#D55E00;background:var(--bad)}
.missing{border-color:#999;background:var(--head)}.verdict ul,.missing ul{margin:.3em 0;padding-left:1.3em}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:.95em}
.answers{display:grid;grid-template-columns:1fr 1fr;gap:1em}.answers>div{background:var(--head);padding:.5em .8em}
.small{color:var(--soft);font-size:.92em}
</style></head>
<body>
<h1>Report of run {{ run.folder.resolve().name }}</h1>
{% for found in second_rule.second_rule(run) %}<p>{{ second_rule.sentence(found) }}</p>
{% endfor %}
{{ picture("worst_group") }}
<dl class="facts">{% for key, value in facts(run) %}<dt>{{ key }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% if run.missing %}
<div class="missing"><b>This report is incomplete</b>
{{ bullets(run.missing) }}</div>
{% endif %}
{% for name, survey in truths(run) %}
{% set gains = findings.gains(run, survey=survey) %}
{% if gains %}
<div class="verdict{{ "" if gains|map(attribute="verdict")|unique|list == ["gain"] else " none" }}">
<b>Against the {{ name }} ({{ metric_name(run) }}): {{ findings.verdict_word(gains) }}</b>
<ul>{% for gain in gains %}<li>{{ findings.sentence(gain) }}</li>{% endfor %}
{% set worst = findings.worst_group(run, survey=survey) %}{% if worst %}<li>{{ worst }}</li>{% endif %}</ul></div>
{% endif %}
{% endfor %}
{% set differences = findings.differences(run) %}
{% if differences %}
<div class="missing"><b>Can this run tell rules apart?</b>
{{ bullets(differences) }}
{% call folded("Rules side by side") %}{% if run.differences.rules %}{{ table(rules_table(run)) }}{% endif %}
{% endcall %}</div>
{% endif %}
{% if run.row("ppo", run.training_metric) %}
<p>One run with one seed: how far these differences vary between seeds is not known from it.
{%- if run.questions and run.questions.held_out < findings.FEW_QUESTIONS %}
 Intervals over only {{ run.questions.held_out }} held-out questions are too narrow, so take them as hints.
{%- endif %}</p>
{% endif %}
{% call section("Results") %}
{% if run.summary %}
{{ picture("models") }}
{{ table(training_metric_table(run)) }}
{% for sentence in (accuracy.trust(run.pluralllm) if run.pluralllm else []) %}
<p class="small">{{ sentence }}</p>
{% endfor %}
{% call folded("All metrics") %}{% if run.metrics|length > 1 %}{{ table(all_metrics_table(run)) }}{% endif %}
{% endcall %}
{% endif %}
{% endcall %}
{% call section("Per group") %}
{{ picture("spider") }}{% if run.groups %}{{ table(per_group_table(run)) }}{% endif %}
{% endcall %}
{% call section("Fairness and weights") %}
{% set found, rule = findings.fall_back(run.iterations), run.settings.rule %}
{% if found %}
<p>The rule ({{ rule }}) fell back to the plain mean in {{ found.fell_back }} of {{ found.total }} iterations (
{{- "{:.1%}".format(found.share) }}); it weighted the groups in {{ found.total - found.fell_back }} (
{{- "{:.1%}".format(1 - found.share) }}).</p>
{% if found.hardly_adaptive %}
<div class="warning">Warning: the adaptive branch was taken in less than {{ "{:.0%}".format(1 / findings.HARDLY_EVER) }}
of the iterations, so this run is in effect one with the rule average. With appa.fairness-threshold above 1 the branch
is always taken.</div>
{% endif %}
{% elif run.iterations %}
<p>The rule ({{ rule }}) has no threshold: it never switches to the plain mean.</p>
{% endif %}
{{ picture("fairness") }}{{ picture("weights") }}{{ picture("history") }}{{ picture("rewards") }}
{% endcall %}
{% call section("Served to other trainers") %}
{% for name, lines in run.served.items() %}
<p>Served to {{ name }}: {{ lines|length }} rounds, {{ lines|sum(attribute="size") }} answers; mean reward
{{ (lines|map(attribute="reward")|sum / lines|length)|number }}, in the last round {{ lines[-1].reward|number }} with
fairness index {{ lines[-1].fairness_index|number(4) }}; rounds that a group missed:
{{ lines|selectattr("missing_groups")|list|length }}.</p>
{% call folded("How long the groups took") %}{{ table(served_groups_table(lines)) }}{% endcall %}
{% for of in ("fairness", "weights", "history", "rewards") %}{{ picture("served_" ~ name ~ "_" ~ of) }}{% endfor %}
{% endfor %}
{% endcall %}
{% call section("Learning curve") %}{{ picture("learning_curve") }}{% endcall %}
{% call section("PPO health") %}{% call folded("Losses, KL, entropy, length") %}{{ picture("ppo_health") }}{% endcall %}
{% endcall %}
{% call section("Time") %}
{% set share = findings.federation_share(run.iterations) %}
{% if share is not none %}
<p>{{ "{:.1%}".format(share) }} of the iterations' time was spent waiting for groups.</p>
{% endif %}
{% endcall %}
{% call section("Preference predictor") %}
{% set found = run.pluralllm %}
{% if found and found.scores %}
{{ table(predictor_table(found)) }}
{{ bullets([accuracy.validated(found)]|select) }}
{% endif %}
{{ picture("pluralllm") }}
{{ picture("pluralllm_groups") }}
{% endcall %}
{% call section("Example answers") %}
{% for example in run.examples %}
<h3>{{ example.question }}</h3><ol>{% for option in example.options %}<li>{{ option }}</li>{% endfor %}</ol>
<div class="answers"><div><b>SFT</b><pre>{{ example.sft }}</pre></div>
<div><b>PPO</b><pre>{{ example.ppo }}</pre></div></div>
<p class="small">Mean reward over the groups: {{ example.mean_reward|number }}</p>
{% set targets = targets_table(run, example) %}
{% call folded("Predictions by group, which rewards follow") %}{% if targets %}{{ table(targets) }}{% endif %}
{% endcall %}
{% endfor %}
{% endcall %}
{% call section("Configuration") %}{% call folded("All keys") %}{{ table(config_table(run)) }}{% endcall %}{% endcall %}
</body></html>
"""

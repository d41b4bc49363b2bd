"""Names that some program would obey, and names of all scripts that must come back as they are."""

from __future__ import annotations

CODE = "$exec(bytes.fromhex('{hex}'))or'mass'"
"""A name that MONAI would run: the program is in `hex`."""

PERMITTED = (
    # medicine
    *("Pleural Effusion", "HER2+/ER-", "T<2 & N=0", "5% Necrosis", "O'Brien's Sign", "Grade 2-3 (A.B)"),
    *("A/B", "A_B"),
    # paths, HTML, Markdown
    *("../../x", "./x", "C:/x", "/etc/passwd", "a//b", "a.b/../c", ".x", "x.", "CON", "nul.txt", "x.y.z"),
    *("<b>Bold", "<script>alert(1)", "&lt", "a&amp b", "<x>", "</td>", "<img src=x onerror=y>"),
    *("<svg/onload=x>", "a<b>c", "x' onmouseover=y x='", "a & b", "a&b=c", "javascript:x"),
    "data:text/html,x",
    *("- x", "+ x", "= x", "> x", "1. x", "1) x", "10. x", "123. x", "123456789) x", "2) x", "- - x"),
    *("--- x", ":skull:", ":smile: x"),
    *("http://x.org/a", "https://x.org", "www.x.org", "_x", "__x__", "a__b", "(a)", "a)b(c"),
    # formulas and CSV
    *("=1+1", "+1", "-1", "'=1+1", "''-1", "-x", "=cmd x", "+SUM(A1)", "-2+3", "=HYPERLINK('x')"),
    *("'a'", "a''b", "x, y", "1,5", "a,b,c", "k=v, w=x"),
    # MONAI, HOCON, TOML, YAML, Python
    *("::x", "x::y", "5%::x", "a%b", "a %:: b", "include", "null", "true", "no", "NaN", "1e3", "0x10"),
    "1:20",
    *("x: y", "x = y", "x = '''", "__import__('os')", "__class__", "x%s", "x%(y)s", "x%20y", "a%0Ab"),
    # scripts
    *("肺炎", "氣胸 (左)", "폐렴", "肺結節・左", "пневмония", "Πνευμονία", "ἀήρ", "דלקת ריאות", "צה״ל", "ג׳"),
    *("صدر الهواء", "بی‌نظمی", "नमूना", "र‍्याब", "ന്‍", "क्‌ष", "ක්‍ෂය", "ปอดบวม", "Viêm phổi", "Größe", "Œdème"),
    *("Արյուն", "ფილტვი", "ሳንባ", "གློ་བ", "ဖျား", "ជំងឺ", "Col·lapse", "½ x", "Ⅳ", "²x", "x₂", "e\u0301"),
    *("١٢٣ x", "१२", "𝔸x", "𠮷", "ꙮ", "x" * 200, "肺" * 200),
)
"""Names that the rule permits."""

_IN_THE_MIDDLE = '"\\`*[]{}|#~^$@!?;\u201c\u2212\u2260\u00b0\u20ac\U0001f480\uff04\uff20\uff05\u00a0\u3000'
_INVISIBLE = [
    *range(0x20),
    *range(0x7F, 0xA0),
    *(0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x180B, 0x180E, 0x200B, 0x200E, 0x200F, 0x2028, 0x2029),
    *range(0x202A, 0x202F),
    *range(0x2060, 0x2070),
    *(0x3164, 0xFE0F, 0xFEFF, 0xFFA0, 0xFFF9, 0xFFFE, 0xE000, 0x1D173, 0xE0001, 0xE0041, 0xE0100),
]

_SYNTAX = [
    # MONAI
    *("$1", "$print(1)", "$import os", "$@labels", "@labels", "@::labels", "@#labels", "a @## b"),
    *("%labels", "%::x"),
    *("%/etc/x.json::y", "a#b", "$'x'", "@", "$", "%", "x@#y", "$__import__('os').system('x')", "#0"),
    "labels#0",
    # FLARE, HOCON
    *("{$HOME}", "{$PATH} x", "${HOME}", "${?HOME}", "${secret:x}", "{name}", "{{x}}", 'include "x"', "}"),
    "{",
    *('include file("/etc/passwd")', 'include url("http://x")', "a = ${b}", '"', '"x"', '"""', "x\\"),
    "\\u0041",
    # TOML, YAML
    *('x" = 1', "x\n[y]", '"]\ny = 1', "# x", "x # y", "!!python/object:os.system", "*x", "&x *x", "? x"),
    *("|", "| x", "> |", "{a: b}", "[a]", "[[a]]", "@x: y", "`x`", "x\n---\ny", "...\n", "%YAML 1.2", "a\tb"),
    # Markdown, HTML, mermaid
    *("[x](http://y)", "![x](y)", "**x**", "*x*", "~~x~~", "# x", "a|b", "|---|", "```", "`x`", "<x@y.z>"),
    "$x$",
    *("$\\frac{1}{2}$", "$$x$$", "\\[x\\]", "[^1]", '"><script>alert(1)</script>', "<!--\nx-->", "]]>"),
    *("x;y", "&#60;"),
    *("&lt;b&gt;", 'x"]\nend\nclick x', "x-->y;z", "%%{init: {}}%%", "@user", "x@y.org", "{% x %}"),
    *("{{ 1 }}", "{# x #}"),
    # CSV, spreadsheets
    *("@SUM(1+1)", "\t=1", "\r=1", "\n=1", '"=1"', "=cmd|' /C calc'!A0", 'a"b', "a\nb", "a;b", "\uff1d1"),
    "\uff201",
    # terminals and logs
    *("\x1b[2J", "\x1b]0;x\x07", "a\x1b[1A\x1b[2Kb", "\x9b2J", "a\rb", "a\x08b", "\x07", "\x00", "a\x00b"),
    "[bold]x[/]",
    *("[red]", "[/]", "a\u202eb", "\u2066a\u2069", "a\u200bb", "\ufeffa", "a\u2028b", "a\u200db"),
    *("\u200ca", "a\u200c"),
    # shells, DICOM, paths, Python
    *("$(x)", "`x`", "x; y", "x && y;", "a\\b", "A\\B\\C", "..\\x", "x|y", "x > y!", "!x", "x?", "*"),
    *("%d{x}", "f'{x}'"),
    *("", " ", "---", "...", "()", "\u0301", "x" * 201, "肺" * 201),
]

REFUSED = tuple(
    dict.fromkeys(
        [
            CODE.format(hex="00"),
            *_SYNTAX,
            *(f"a{c}b" for c in _IN_THE_MIDDLE if c not in "\u00a0\u3000"),
            *(f"a{chr(code)}b" for code in _INVISIBLE),
        ]
    )
)
"""Names that are refused where they enter, and that every file must hold all the same."""

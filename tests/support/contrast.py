"Which texts of a page in a browser are hard to read, by WCAG 2's measure of contrast."

_FAINT = """([selector, least]) => {
    const pixel = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
    const rgba = colour => {
        pixel.clearRect(0, 0, 1, 1)
        pixel.fillStyle = colour
        pixel.fillRect(0, 0, 1, 1)
        const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data
        return [r, g, b, a / 255]
    }
    const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]))
    const light = colour => {
        const [r, g, b] = colour.map(c => c / 255).map(
            c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const under = (element, box) => { // What is drawn behind: layers, the uppermost first
        const layers = []
        if (element.closest('svg')) {
            const all = document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2)
            for (const shape of all) {
                if (!shape.closest('svg') || shape === element || !shape.getBBox) continue
                if (['rect', 'circle', 'path'].includes(shape.tagName))
                    layers.push(rgba(getComputedStyle(shape).fill))
            }
        }
        for (let e = element; e; e = e.parentElement) {
            const layer = rgba(getComputedStyle(e).backgroundColor)
            layers.push(layer)
            if (layer[3] === 1) break
        }
        const dark = matchMedia('(prefers-color-scheme: dark)').matches
        const base = dark ? [18, 18, 18] : [255, 255, 255]
        return layers.reverse().reduce((below, top) => over(top, below), base)
    }
    const found = new Map()
    const look = (element, text, box) => {
        if (!text.trim() || box.width < 2 || box.height < 2) return
        if (element.closest(':disabled, [aria-hidden=true], .jp-mod-disabled')) return
        if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) return
        const style = getComputedStyle(element)
        const drawn = element.closest('svg') && style.fill !== 'none'
        const colour = rgba(drawn ? style.fill : style.color)
        let opacity = 1
        for (let e = element; e; e = e.parentElement) opacity *= Number(getComputedStyle(e).opacity)
        const below = under(element, box)
        colour[3] *= opacity
        const [a, b] = [light(over(colour, below)), light(below)]
        const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
        const drawn_only = !/[\\p{L}\\p{N}]/u.test(text) // A sign is no text: 3 is enough
        if (contrast < (drawn_only ? 3 : least))
            found.set(text.trim().slice(0, 40), Math.round(100 * contrast) / 100)
    }
    for (const root of document.querySelectorAll(selector)) {
        const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT)
        for (let node; node = walker.nextNode();) {
            const tag = node.parentElement.tagName
            if (['STYLE', 'SCRIPT', 'OPTION', 'TITLE'].includes(tag)) continue
            // What lies behind a text of a picture can be asked only where it is in sight
            if (node.parentElement.closest('svg'))
                node.parentElement.scrollIntoView({block: 'center'})
            const range = document.createRange()
            range.selectNodeContents(node)
            for (const box of [...range.getClientRects()].slice(0, 1))
                look(node.parentElement, node.data, box)
        }
        for (const field of root.querySelectorAll('input, select, textarea'))
            look(field, field.selectedOptions?.[0]?.text ?? field.value,
                 field.getBoundingClientRect())
    }
    return Object.fromEntries(found)
}"""


def faint_texts(page, selector="body", least=4.5):
    "Texts in sight with a lower contrast, and their contrast; what is disabled may be faint."
    return page.evaluate(_FAINT, [selector, least])
